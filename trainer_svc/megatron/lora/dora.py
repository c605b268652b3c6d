"""DoRA (arXiv 2402.09353): a trained magnitude for every output row of W + scale * B A."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_svc.megatron.lora.pair import LoraPair
from trainer_svc.megatron.model.linears import Split

if TYPE_CHECKING:
    from trainer_svc.megatron.lora.linear import LoraLinear


def row_factor(linear: LoraLinear, pair: LoraPair) -> Tensor:
    """magnitude / ||W + scale B A|| of this rank's output rows, float32.

    The norm counts as a constant in the backward pass (section 4.3).
    """
    assert pair.magnitude is not None
    return pair.magnitude.float() / row_norms(linear, pair)


@torch.no_grad()
def row_norms(linear: LoraLinear, pair: LoraPair) -> Tensor:
    """||W + scale B A|| of this rank's output rows (out,), over the input columns of all ranks.

    ||w + s A'b||^2 = ||w||^2 + 2 s b'(A w) + s^2 b'(A A')b needs no second matrix of W's size. All
    ranks that share a row-parallel linear must call this.
    """
    weight = linear.weight
    a, b, scale = pair.lora_a.float(), pair.lora_b.float(), pair.pair.scale
    products = torch.nn.functional.linear(weight, a.to(weight.dtype)).float()
    squares: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
    squares += (b * (2 * scale * products + scale**2 * (b @ (a @ a.t())))).sum(1)
    if linear.site.linear.split is Split.COLUMNS and linear.size > 1:
        dist.all_reduce(squares, group=linear.group)
    return squares.clamp_min(0).sqrt()
