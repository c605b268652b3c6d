"""Four layouts of the same factors, told apart by their tag alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.adapter import ExpertLayout, Layout
from trainer_svc.megatron.adapter_io.expert_layouts import holder, pack, unpack

E, R, WIDTH = 3, 2, 4
"""Experts, rank, and a width that is input's and output's alike: shapes say nothing."""

A = [torch.arange(R * WIDTH).view(R, WIDTH) + 100 * e for e in range(E)]
B = [torch.arange(WIDTH * R).view(WIDTH, R) + 100 * e + 1000 for e in range(E)]

EXPECTED: dict[Layout, Tensor] = {
    Layout.PACKED_A: torch.stack(A),
    Layout.PACKED_B: torch.stack(B),
    Layout.FLAT_A: torch.cat(A),
    Layout.FLAT_B: torch.stack(B, dim=2).reshape(WIDTH, R * E),
    Layout.SWAPPED_A: torch.cat([b.t() for b in B]),
    Layout.SWAPPED_B: torch.cat([a.t() for a in A], dim=1),
}
HOLDS = {Layout.SWAPPED_A: B, Layout.SWAPPED_B: A}


def factors(layout: Layout) -> list[Tensor]:
    return HOLDS.get(layout, A if layout.value.endswith("A") else B)


@pytest.mark.parametrize("layout", EXPECTED)
def test_every_element_lands_in_its_slot_and_comes_back(layout: Layout) -> None:
    """faults.md 13, Megatron-Bridge#5634."""
    whole = pack(factors(layout), layout)
    assert torch.equal(whole, EXPECTED[layout])
    assert whole.is_contiguous()
    found = unpack(whole, layout, num_experts=E)
    assert all(torch.equal(a, b) for a, b in zip(found, factors(layout), strict=True))


def test_flat_columns_alternate_between_experts() -> None:
    whole = pack(B, Layout.FLAT_B)
    assert whole[0].tolist() == [1000, 1100, 1200, 1001, 1101, 1201]


def test_swapped_columns_are_expert_after_expert() -> None:
    assert pack(A, Layout.SWAPPED_B)[1].tolist() == [1, 5, 101, 105, 201, 205]


def test_shapes_agree_where_the_factors_do_not() -> None:
    """A flat A and a swapped one have one shape: only the tag tells."""
    assert EXPECTED[Layout.FLAT_A].shape == EXPECTED[Layout.SWAPPED_A].shape
    assert not torch.equal(EXPECTED[Layout.FLAT_A], EXPECTED[Layout.SWAPPED_A])
    wrong = unpack(EXPECTED[Layout.SWAPPED_A], Layout.FLAT_A, num_experts=E)
    assert not any(torch.equal(a, b) for a, b in zip(wrong, A, strict=True))


@pytest.mark.parametrize("one", ExpertLayout)
@pytest.mark.parametrize("other", ExpertLayout)
def test_conversion_between_any_two_and_back_is_exact(
    one: ExpertLayout, other: ExpertLayout
) -> None:
    if ExpertLayout.PER_EXPERT in (one, other):
        return
    for is_a, own in ((True, A), (False, B)):
        first, second = holder(one, is_a=is_a), holder(other, is_a=is_a)
        there = pack(unpack(pack(own, first), first, num_experts=E), second)
        back = pack(unpack(there, second, num_experts=E), first)
        assert torch.equal(there, EXPECTED[second])
        assert torch.equal(back, EXPECTED[first])


def test_the_swapped_layout_has_b_in_the_tensor_named_a() -> None:
    assert holder(ExpertLayout.SWAPPED, is_a=False) is Layout.SWAPPED_A
    assert holder(ExpertLayout.FLAT, is_a=False) is Layout.FLAT_B
