"""Values that an adapter starts with; they depend on seed and name alone, not on the ranks."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor, nn

from trainer_svc.megatron.lora import dora
from trainer_svc.megatron.lora.linear import LoraLinear
from trainer_svc.megatron.lora.pair import A, B, LoraPair, leaf_shape, leaf_shard
from trainer_svc.megatron.lora.settings import LoraSettings


@torch.no_grad()
def start_values(linear: LoraLinear, *, settings: LoraSettings, seed: int) -> None:
    """Set the values of its adapter `default`. All ranks that share the linear must call this."""
    for number, pair in enumerate(linear.pairs("default")):
        for leaf, kind in ((A, settings.a_init), (B, settings.b_init)):
            name = f"{linear.site.name}.{number}.{leaf}"
            _fill(linear, pair, leaf, kind=kind, seed=seed ^ zlib.crc32(name.encode()))
        if pair.magnitude is not None:
            pair.magnitude.copy_(dora.row_norms(linear, pair))


def _fill(linear: LoraLinear, pair: LoraPair, leaf: str, *, kind: str, seed: int) -> None:
    parameter: Tensor = getattr(pair, leaf)
    if kind == "zero":
        parameter.zero_()
        return
    whole = torch.empty(leaf_shape(linear.site, pair.pair, leaf))
    _draw(whole, kind, generator=torch.Generator().manual_seed(seed), rank=pair.pair.rank)
    shard = leaf_shard(linear.site, pair.pair, leaf)
    parameter.copy_(shard.part(whole, rank=linear.group.rank(), size=linear.size))


def _draw(whole: Tensor, kind: str, *, generator: torch.Generator, rank: int) -> None:
    if kind == "xavier":
        nn.init.xavier_normal_(whole, generator=generator)
    elif kind == "xavier_uniform":
        nn.init.xavier_uniform_(whole, generator=generator)
    elif kind == "kaiming":
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
    else:
        nn.init.normal_(whole, std=1 / rank, generator=generator)
