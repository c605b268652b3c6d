"""Base weights with an adapter merged in."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer_svc.megatron.lora import dora
from trainer_svc.megatron.lora.linear import LoraLinear


@torch.no_grad()
def merged_weight(linear: LoraLinear, *, adapter: str = "default") -> Tensor:
    """This rank's part of W + scale B A, or of magnitude / norm times that: a sum in float32,
    rounded once to the base's type; nothing of it is kept.

    All ranks that share a row-parallel linear with DoRA must call this.
    """
    pairs = linear.pairs(adapter)
    deltas = [(p.lora_b.float() @ p.lora_a.float()).mul_(p.pair.scale) for p in pairs]
    merged = linear.fused_rows(pairs, deltas).add_(linear.weight)
    if pairs[0].magnitude is not None:
        merged *= dora.row_factor(linear, pairs[0]).unsqueeze(1)
    return merged.to(linear.weight.dtype)
