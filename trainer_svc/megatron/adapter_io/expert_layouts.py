"""How the factors of all experts of a layer lie in one tensor: pure functions.

Nothing here looks at sizes to find out what a tensor holds: where input and output width agree,
only the layout tells.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.adapter import ExpertLayout, Layout

IS_A = {
    Layout.LORA_A: True,
    Layout.LORA_B: False,
    Layout.PACKED_A: True,
    Layout.PACKED_B: False,
    Layout.FLAT_A: True,
    Layout.FLAT_B: False,
    Layout.SWAPPED_A: False,
    Layout.SWAPPED_B: True,
}
"""Whether a tensor holds A (rank, in) factors, or B (out, rank) ones."""


def holder(layout: ExpertLayout, *, is_a: bool) -> Layout:
    """Tag of the tensor that holds the experts' As, or their Bs."""
    return next(tag for tag in layout.factors if IS_A[tag] is is_a)


def whole_shape(layout: Layout, *, num_experts: int, factor: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the tensor with the factors of all experts; `factor` is the shape of one's."""
    rows, columns = factor
    match layout:
        case Layout.PACKED_A | Layout.PACKED_B:
            return num_experts, rows, columns
        case Layout.FLAT_A:
            return num_experts * rows, columns
        case Layout.FLAT_B:
            return rows, columns * num_experts
        case Layout.SWAPPED_A:
            return num_experts * columns, rows
        case Layout.SWAPPED_B:
            return columns, num_experts * rows
    return factor


def factor_view(whole: Tensor, layout: Layout, *, expert: int, num_experts: int) -> Tensor:
    """One expert's A (rank, in) or B (out, rank), in the memory of the tensor with all of them."""
    match layout:
        case Layout.PACKED_A | Layout.PACKED_B:
            return whole[expert]
        case Layout.FLAT_A:
            return whole.view(num_experts, -1, whole.shape[1])[expert]
        case Layout.FLAT_B:
            return whole.view(whole.shape[0], -1, num_experts)[..., expert]
        case Layout.SWAPPED_A:
            return whole.view(num_experts, -1, whole.shape[1])[expert].t()
        case Layout.SWAPPED_B:
            return whole.view(whole.shape[0], num_experts, -1)[:, expert].t()
    return whole


def pack(factors: Sequence[Tensor], layout: Layout) -> Tensor:
    """The tensor with every expert's A, or every expert's B, in the order of experts."""
    rows, columns = factors[0].shape
    size = len(factors)
    whole = factors[0].new_empty(whole_shape(layout, num_experts=size, factor=(rows, columns)))
    for expert, factor in enumerate(factors):
        factor_view(whole, layout, expert=expert, num_experts=size).copy_(factor)
    return whole


def unpack(whole: Tensor, layout: Layout, *, num_experts: int) -> list[Tensor]:
    """Inverse of `pack`."""
    views = [
        factor_view(whole, layout, expert=expert, num_experts=num_experts)
        for expert in range(num_experts)
    ]
    return [view.clone(memory_format=torch.contiguous_format) for view in views]
