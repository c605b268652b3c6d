"""Process groups of the ranks and the few collectives training and export need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from common.errors import ConfigError
from trainer_svc.megatron import device

T = TypeVar("T")


def start(*, tensor_parallel_size: int) -> None:
    """Make Megatron's groups over the ranks of the default process group; a second call re-makes.

    Raises:
        ConfigError: the number of ranks is no multiple of `tensor_parallel_size`.
    """
    world = dist.get_world_size()
    if world % tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size: found {tensor_parallel_size} over {world} ranks; "
            "choose a divisor of the number of ranks"
        )
    device.answer_for_cuda()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel_size)


def tp_rank() -> int:
    """This rank's place among those that share one copy of the model."""
    return int(parallel_state.get_tensor_model_parallel_rank())


def tp_size() -> int:
    """Number of ranks that share one copy of the model."""
    return int(parallel_state.get_tensor_model_parallel_world_size())


def dp_rank() -> int:
    """Which copy of the model this rank belongs to."""
    return int(parallel_state.get_data_parallel_rank())


def dp_size() -> int:
    """Number of copies of the model."""
    return int(parallel_state.get_data_parallel_world_size())


def gather_tp(tensor: Tensor) -> list[Tensor]:
    """The tensor of every tensor-parallel rank, in rank order; shapes are alike."""
    if tp_size() == 1:
        return [tensor]
    shards = [torch.empty_like(tensor) for _ in range(tp_size())]
    dist.all_gather(
        shards, tensor.contiguous(), group=parallel_state.get_tensor_model_parallel_group()
    )
    return shards


def sum_tp(tensor: Tensor) -> Tensor:
    """Sum over the tensor-parallel ranks, in place."""
    if tp_size() > 1:
        dist.all_reduce(tensor, group=parallel_state.get_tensor_model_parallel_group())
    return tensor


def sum_dp(tensors: Sequence[Tensor]) -> None:
    """Sum every tensor over the copies of the model, in place, as one message."""
    if dp_size() == 1:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=parallel_state.get_data_parallel_group())
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def gather_dp_objects(value: T) -> list[T]:
    """A small picklable value of every copy of the model, in order."""
    if dp_size() == 1:
        return [value]
    values: list[T | None] = [None] * dp_size()
    dist.all_gather_object(values, value, group=parallel_state.get_data_parallel_group_gloo())
    return [v for v in values if v is not None]
