"""A Hugging Face directory's weights into this rank's part of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from safetensors import safe_open
from torch import Tensor

from common.errors import ConfigError
from trainer_svc.megatron.model import names
from trainer_svc.megatron.model.base_config import BaseConfig


class Weights:
    """Tensors of a Hugging Face directory by name, read when asked for."""

    def __init__(self, files: dict[str, Any]) -> None:
        self._files = files

    def read(self, name: str) -> Tensor:
        """One whole tensor as it is stored.

        Raises:
            ConfigError: the directory has no such tensor.
        """
        if name not in self._files:
            raise ConfigError(f"model_dir: the weights have no tensor {name}; download them again")
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


@contextmanager
def open_weights(model_dir: Path) -> Iterator[Weights]:
    """Open all safetensors files of a directory for the time of a `with` block."""
    paths = sorted(model_dir.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"model_dir: found no *.safetensors in {model_dir}; convert the weights")
    with ExitStack() as stack:
        files = {}
        for path in paths:
            file = stack.enter_context(safe_open(path, framework="pt"))
            files.update(dict.fromkeys(file.keys(), file))
        yield Weights(files)


@torch.no_grad()
def load_weights(chunk: GPTModel, weights: Weights, *, base: BaseConfig) -> None:
    """Fill every parameter and expert bias of one of this rank's runs of layers.

    Raises:
        ConfigError: a tensor is missing, or not of the shape that `config.json` makes it.
    """
    for name, tensor in named_tensors(chunk, base):
        stored = names.stored(base, name)
        parts = [weights.read(part) for part in stored.names]
        whole = names.fuse(stored.fusion, parts, heads=base.heads)
        rank, size = _place(is_expert=stored.is_expert)
        part = stored.shard.part(whole, rank=rank, size=size)
        if part.shape != tensor.shape:
            raise ConfigError(
                f"model_dir: {stored.names[0]} makes {tuple(part.shape)} where config.json makes "
                f"{tuple(tensor.shape)}; download both again"
            )
        tensor.copy_(part)


def named_tensors(chunk: GPTModel, base: BaseConfig) -> Iterator[tuple[str, Tensor]]:
    """What comes from the directory, under names with layers and experts counted over the whole
    model."""
    first_layer = chunk.decoder.layers[0].layer_number - 1
    first_expert = 0
    if base.moe is not None:
        local = base.moe.num_experts // parallel_state.get_expert_model_parallel_world_size()
        first_expert = parallel_state.get_expert_model_parallel_rank() * local
    biases = ((n, t) for n, t in chunk.named_buffers() if n.endswith(".expert_bias"))
    for name, tensor in (*chunk.named_parameters(), *biases):
        yield names.global_name(name, first_layer=first_layer, first_expert=first_expert), tensor


def _place(*, is_expert: bool) -> tuple[int, int]:
    """(rank, size) among those that share a linear."""
    if is_expert:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
