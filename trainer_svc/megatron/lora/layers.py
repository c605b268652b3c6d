"""LoRA (arXiv 2106.09685) on Megatron's linears, split over tensor-parallel ranks as these are."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from trainer_svc.megatron import parallel
from trainer_svc.megatron.lora.targets import resolve_targets
from trainer_svc.megatron.model import names
from trainer_svc.megatron.settings import LoraSettings


class LoraLinear(nn.Module):
    """A frozen Megatron linear plus `scale * B A x`.

    Column-parallel base: A (rank, in) is whole on every rank, B (out, rank) holds this rank's
    rows. Row-parallel base: A holds this rank's columns, B is whole. The arithmetic is in the
    input's type, as the rollout's is; the parameters may be wider.
    """

    def __init__(
        self, base: ColumnParallelLinear | RowParallelLinear, *, settings: LoraSettings
    ) -> None:
        super().__init__()
        out_features, in_features = base.weight.shape
        options = {"dtype": getattr(torch, settings.dtype), "device": base.weight.device}
        self.base = base
        self.row_parallel = isinstance(base, RowParallelLinear)
        self.lora_a = nn.Parameter(torch.empty(settings.rank, in_features, **options))
        self.lora_b = nn.Parameter(torch.zeros(out_features, settings.rank, **options))
        self.dropout = nn.Dropout(settings.dropout)
        self.scale = settings.scale
        self.enabled = True

    @property
    def sharded(self) -> nn.Parameter:
        """The one of A and B of which every tensor-parallel rank holds a part."""
        return self.lora_a if self.row_parallel else self.lora_b

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Output (seq, batch, out) and the base's bias, of x (seq, batch, in)."""
        output, bias = self.base(x)
        if not self.enabled:
            return output, bias
        hidden = nn.functional.linear(self.dropout(x), self.lora_a.to(x.dtype))
        # The collective sits on the narrow side: rank-sized forward for a row-parallel base, and
        # backward for a column-parallel one, whose ranks each see a part of B's gradient.
        cross_ranks = (
            reduce_from_tensor_model_parallel_region
            if self.row_parallel
            else copy_to_tensor_model_parallel_region
        )
        hidden = cross_ranks(hidden, group=parallel_state.get_tensor_model_parallel_group())
        summed = torch.addmm(
            output.flatten(0, -2),
            hidden.flatten(0, -2),
            self.lora_b.to(x.dtype).t(),
            alpha=self.scale,
        )
        return summed.view_as(output), bias


def add_lora(model: GPTModel, *, settings: LoraSettings, seed: int) -> None:
    """Put adapters on the modules that `settings` names, in place; they are all that trains.

    The start values depend on the seed and on the module's name alone, so they are the same at
    every parallel size.

    Raises:
        ConfigError: a target matches nothing.
    """
    model.requires_grad_(False)
    targets = resolve_targets(settings.target_modules, num_layers=model.config.num_layers)
    for name in sorted(targets):
        parent, _, own = name.rpartition(".")
        adapted = LoraLinear(model.get_submodule(name), settings=settings)
        _init_a(adapted, name=name, kind=settings.a_init, seed=seed)
        setattr(model.get_submodule(parent), own, adapted)


def lora_modules(model: GPTModel) -> Iterator[tuple[int, str, LoraLinear]]:
    """(layer, linear, module) of every adapter, in the order of layers and of `names.LINEARS`."""
    for layer, block in enumerate(model.decoder.layers):
        for linear in names.LINEARS:
            module = block.get_submodule(linear)
            if isinstance(module, LoraLinear):
                yield layer, linear, module


def trainable_parameters(model: GPTModel) -> list[nn.Parameter]:
    """Every adapter's A, then its B, in walking order."""
    return [p for _, _, module in lora_modules(model) for p in (module.lora_a, module.lora_b)]


@contextmanager
def adapters_off(model: GPTModel) -> Iterator[None]:
    """The base model alone, for the time of a `with` block: the reference policy."""
    before = [(module, module.enabled) for _, _, module in lora_modules(model)]
    for module, _ in before:
        module.enabled = False
    try:
        yield
    finally:
        for module, enabled in before:
            module.enabled = enabled


@torch.no_grad()
def _init_a(module: LoraLinear, *, name: str, kind: str, seed: int) -> None:
    rank, columns = module.lora_a.shape
    size = parallel.tp_size() if module.row_parallel else 1
    whole = torch.empty(rank, columns * size)
    generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
    if kind == "xavier":
        nn.init.xavier_normal_(whole, generator=generator)
    elif kind == "kaiming":
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
    else:
        nn.init.normal_(whole, std=1 / rank, generator=generator)
    part = whole.chunk(size, dim=1)[parallel.tp_rank()] if module.row_parallel else whole
    module.lora_a.copy_(part)
