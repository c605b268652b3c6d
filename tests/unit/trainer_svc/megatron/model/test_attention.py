from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_svc.megatron.model.attention import LayoutAttention
from trainer_svc.megatron.model.layout import causal_layout, token_positions

HEADS, GROUPS = 6, 2
MIXED = torch.tensor(
    [
        [17, 4, 10, 7],
        [21, 1, 10, 7],
        [0, 5, 0, 0],
        [5, 3, 0, 5],
        [8, 2, 0, 5],
        [10, 7, 0, 0],
        [22, 2, 0, 0],
        [24, 90, 0, 0],
        [114, 60, 24, 90],
    ]
)
"""Two prompts with completions, a short sequence, and a long prompt with a long completion."""


def allowed(layout: Tensor) -> Tensor:
    """Which query (row) may see which key (column), straight from what a layout means."""
    length = int(layout[:, 1].sum())
    mask = torch.zeros(length, length, dtype=torch.bool)
    for begin, own, prompt_begin, prompt in layout.tolist():
        mask[begin : begin + own, begin : begin + own] = torch.ones(own, own).tril().bool()
        mask[begin : begin + own, prompt_begin : prompt_begin + prompt] = True
    return mask


def dense(q: Tensor, k: Tensor, v: Tensor, layout: Tensor, *, scale: float) -> Tensor:
    """All pairs in float64, strangers masked out."""
    per_group = q.shape[2] // k.shape[2]
    q, k, v = (t.squeeze(1).transpose(0, 1).double() for t in (q, k, v))
    k, v = (t.repeat_interleave(per_group, dim=0) for t in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~allowed(layout), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1).unsqueeze(1)


def inputs(length: int, *, key_dim: int, value_dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(HEADS, key_dim), (GROUPS, key_dim), (GROUPS, value_dim)]
    return [
        torch.randn(length, 1, *shape, generator=generator).requires_grad_() for shape in shapes
    ]


@pytest.mark.parametrize("value_dim", [16, 8])
@pytest.mark.parametrize(
    "layout",
    [MIXED, causal_layout([12]), causal_layout([8, 8, 8]), causal_layout([3, 40, 9, 3, 200, 35])],
    ids=["mixed", "one", "alike", "uneven"],
)
def test_outputs_and_gradients_are_those_of_all_pairs_under_a_mask(
    layout: Tensor, value_dim: int
) -> None:
    q, k, v = inputs(int(layout[:, 1].sum()), key_dim=16, value_dim=value_dim)
    found = LayoutAttention(softmax_scale=0.3)(q, k, v, layout)
    expected = dense(q, k, v, layout, scale=0.3)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=0)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(4))
    ours = torch.autograd.grad(found, (q, k, v), upstream)
    theirs = torch.autograd.grad(expected, (q, k, v), upstream.double())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)


def test_the_default_scale_is_that_of_the_heads() -> None:
    q, k, v = inputs(12, key_dim=16, value_dim=16)
    layout = causal_layout([12])
    found = LayoutAttention()(q, k, v, layout)
    expected = dense(q, k, v, layout, scale=0.25)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=0)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of the operators that run in a `with` block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operators(layout: Tensor) -> list[str]:
    """What runs for one forward pass, once the plan is made."""
    q, k, v = inputs(int(layout[:, 1].sum()), key_dim=16, value_dim=16)
    LayoutAttention()(q, k, v, layout)
    recorder = _Recorder()
    with recorder:
        LayoutAttention()(q, k, v, layout)
    return recorder.names


def test_sequences_of_one_length_are_neither_gathered_nor_copied() -> None:
    copies = {"index_select", "cat", "_to_copy", "clone", "copy_", "constant_pad_nd"}
    assert not copies & set(operators(causal_layout([8, 8, 8])))
    assert {"index_select", "cat"} <= set(operators(causal_layout([120, 8, 4])))


def test_like_shapes_share_a_call_of_the_kernel() -> None:
    names = operators(causal_layout([40] * 3 + [38] * 2 + [500]))
    assert sum("attention" in name for name in names) == 2


def test_positions_go_on_after_the_prompt() -> None:
    layout = torch.tensor([[3, 2, 0, 3], [0, 3, 0, 0], [5, 4, 0, 0], [9, 1, 5, 4]])
    assert token_positions(layout).tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
