"""The parameters of one A, B and, with DoRA, magnitude: this rank's part of them."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from torch import nn
from torch.distributed import ProcessGroup

from trainer_svc.megatron.lora.plan import Pair, Site
from trainer_svc.megatron.model.linears import Fusion, Split
from trainer_svc.megatron.model.shard import Shard

A, B, MAGNITUDE = LEAVES = ("lora_a", "lora_b", "magnitude")
"""Names of a pair's tensors, in order; the last only with DoRA."""


def site_group(site: Site) -> ProcessGroup:
    """Ranks that a linear is split over, or, of a router, that each hold all of it."""
    group: ProcessGroup = (
        parallel_state.get_expert_tensor_parallel_group()
        if site.linear.is_expert
        else parallel_state.get_tensor_model_parallel_group()
    )
    return group


def leaf_shard(site: Site, pair: Pair, leaf: str) -> Shard:
    """How a tensor of a pair is split: B and magnitude as the base's rows, A as its columns."""
    split = site.linear.split
    if leaf == A:
        return Shard(1 if split is Split.COLUMNS else None)
    if split is not Split.ROWS:
        return Shard(None)
    fused_gate_up = site.linear.fusion is Fusion.GATE_UP
    return Shard(0, blocks=len(pair.projections) if fused_gate_up else 1)


def leaf_shape(site: Site, pair: Pair, leaf: str) -> tuple[int, ...]:
    """Shape of a whole tensor of a pair."""
    return {
        A: (pair.rank, site.linear.in_features),
        B: (pair.out_features, pair.rank),
        MAGNITUDE: (pair.out_features,),
    }[leaf]


class LoraPair(nn.Module):
    """This rank's part of one pair; the values are not set."""

    def __init__(self, site: Site, pair: Pair, *, has_magnitude: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.pair = pair
        for leaf in LEAVES:
            shape = list(leaf_shape(site, pair, leaf))
            dim = leaf_shard(site, pair, leaf).dim
            if dim is not None:
                shape[dim] //= site_group(site).size()
            held = leaf != MAGNITUDE or has_magnitude
            parameter = nn.Parameter(torch.empty(shape, dtype=dtype)) if held else None
            self.register_parameter(leaf, parameter)

    lora_a: nn.Parameter
    """(rank, in_features)"""

    lora_b: nn.Parameter
    """(out_features, rank)"""

    magnitude: nn.Parameter | None
    """(out_features,), of DoRA."""
