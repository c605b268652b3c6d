"""Process groups of the ranks, this rank's place in them, and the collectives of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import ProcessGroup

from trainer_svc.megatron import device
from trainer_svc.megatron.settings import ParallelSettings

T = TypeVar("T")


def start(settings: ParallelSettings) -> None:
    """Make Megatron's groups over the ranks of the default process group; a second call re-makes.

    Raises:
        ConfigError: the sizes do not divide the number of ranks.
    """
    settings.check(num_ranks=dist.get_world_size())
    stages, runs = settings.pipeline_parallel_size, settings.virtual_pipeline_size
    device.answer_for_cuda()
    _end_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=settings.tensor_parallel_size,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=runs if runs > 1 else None,
        expert_model_parallel_size=settings.expert_parallel_size,
        expert_tensor_parallel_size=settings.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )


def _end_groups() -> None:
    """End the groups of an earlier start: Megatron only forgets them, with some 50 threads."""
    for group in parallel_state._global_process_group_list or ():
        if group is not None:  # The default group, which is not Megatron's.
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def tp_rank() -> int:
    """This rank's place among those that share the linears of its layers."""
    return int(parallel_state.get_tensor_model_parallel_rank())


def tp_size() -> int:
    """Number of ranks that share the linears of a layer."""
    return int(parallel_state.get_tensor_model_parallel_world_size())


def dp_rank() -> int:
    """Which copy of the model this rank belongs to."""
    return int(parallel_state.get_data_parallel_rank())


def dp_size() -> int:
    """Number of copies of the model, experts aside."""
    return int(parallel_state.get_data_parallel_world_size())


def seed_offset() -> int:
    """Differs between ranks unless they see the same activations: those of one linear's parts."""
    stage = int(parallel_state.get_pipeline_model_parallel_rank())
    return dp_rank() + dp_size() * stage


def num_stages() -> int:
    """Number of ranks that a pipeline runs over."""
    return int(parallel_state.get_pipeline_model_parallel_world_size())


def num_stage_ranks() -> int:
    """Number of ranks that hold something of the same layers."""
    return dist.get_world_size() // num_stages()


def is_last_stage() -> bool:
    """Whether this rank holds the last layers, and so sees the model's output."""
    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))


def speaks_for_copy() -> bool:
    """Whether this rank, of all that share one copy of the model, reports the copy's results."""
    return is_last_stage() and tp_rank() == 0


def spreads_experts() -> bool:
    """Whether an expert sees tokens of several ranks, which then wait for each other in a layer."""
    return int(parallel_state.get_expert_tensor_and_model_parallel_world_size()) > 1


def dp_group() -> ProcessGroup:
    """Ranks that hold the same part of the model but for its experts."""
    group: ProcessGroup = parallel_state.get_data_parallel_group()
    return group


def expert_dp_group() -> ProcessGroup:
    """Ranks that hold the same part of the same experts."""
    group: ProcessGroup = parallel_state.get_expert_data_parallel_group()
    return group


def expert_group() -> ProcessGroup:
    """Ranks that hold different experts of the same layers, and the same part of them."""
    group: ProcessGroup = parallel_state.get_expert_model_parallel_group()
    return group


def sum_over(group: ProcessGroup, tensors: Sequence[Tensor]) -> None:
    """Sum every tensor over the group's ranks, in place, as one message; all are of one type."""
    if group.size() == 1 or not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def sum_over_all(tensor: Tensor) -> Tensor:
    """Sum over every rank, in place."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def max_over_copies(values: Sequence[int]) -> list[int]:
    """The largest of each value over the copies of the model."""
    if dp_size() == 1:
        return list(values)
    found = torch.tensor(values, device=device.compute_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=dp_group())
    return [int(value) for value in found]


def gather_objects(value: T) -> list[T]:
    """A small picklable value of every rank, in order."""
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]
