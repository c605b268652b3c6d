"""The LoRA arithmetic that takes the place of vLLM's on a CPU."""

from __future__ import annotations

import pytest
import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from rollout_svc.worker.cpu_lora import GroupedLoraCPU, Packed

SLOTS, RANK, WIDTH_IN, WIDTHS_OUT = 3, 4, 16, (8, 6)


def wrapper(slots: list[int]) -> GroupedLoraCPU:
    """For a batch whose rows have these slots, -1 being none."""
    made = PunicaWrapperCPU(max_num_batched_tokens=128, max_batches=8, device="cpu")
    made._token_lora_indices[: len(slots)] = torch.tensor(slots)
    made.indices_len[0] = len(slots)
    made.__class__ = GroupedLoraCPU
    assert isinstance(made, GroupedLoraCPU)
    made.regroup()
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "slots",
    [
        [2, 2, 2, 2],
        [-1, -1],
        [0, 2, 0, 2, 1],
        [-1, 1, -1, 0, 1],
        [0, 0, 0, 0, 0, 0, 1, 2, -1],
        [2, *[0] * 80, 1, -1],
        [1, -1],
    ],
)
def test_each_row_has_the_change_of_its_own_slot_and_of_no_other(
    slots: list[int], dtype: torch.dtype
) -> None:
    """A base request's rows stay what they are to the last bit; vLLM's own gives them slot 2's."""
    torch.manual_seed(0)
    x = torch.randn(len(slots), WIDTH_IN).to(dtype)
    a = tuple(torch.randn(SLOTS, 1, RANK, WIDTH_IN).to(dtype) for _ in WIDTHS_OUT)
    b = tuple(torch.randn(SLOTS, 1, out, RANK).to(dtype) for out in WIDTHS_OUT)
    before = torch.randn(len(slots), sum(WIDTHS_OUT)).to(dtype)
    after = before.clone()
    wrapper(slots).add_lora_linear(after, x, Packed.a(a), Packed.b(b), 0.5, WIDTHS_OUT)
    for row, slot in enumerate(slots):
        if slot == -1:
            assert torch.equal(after[row], before[row])
            continue
        change = torch.cat(
            [
                bs[slot, 0].float() @ (0.5 * (as_[slot, 0].float() @ x[row].float()))
                for as_, bs in zip(a, b, strict=True)
            ]
        )
        expected = (before[row].float() + change).to(dtype)
        tolerance = 1e-5 if dtype is torch.float32 else 2**-7
        torch.testing.assert_close(after[row], expected, atol=1e-5, rtol=tolerance)
