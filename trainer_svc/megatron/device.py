"""All that Megatron-core needs to run without CUDA; nothing here acts where CUDA exists."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

HAVE_CUDA = torch.cuda.is_available()

BACKEND = "nccl" if HAVE_CUDA else "gloo"
"""Collective backend of the tensors' device."""


def compute_device() -> torch.device:
    """Device that this rank computes on."""
    return torch.device("cuda", torch.cuda.current_device()) if HAVE_CUDA else torch.device("cpu")


def answer_for_cuda() -> None:
    """Make `torch.cuda.current_device`, which Megatron calls on CPU paths too, name the CPU."""
    if not HAVE_CUDA:
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]


class TorchAttention(torch.nn.Module):
    """Causal core attention on torch's kernels.

    Megatron's own draws its dropout from a CUDA generator and holds all scores in memory. Right
    padding needs no mask: a causal query never sees the keys after it. On a CPU the arithmetic is
    in float32: the backward pass of short sequences takes a third of bfloat16's time.
    """

    def __init__(self, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attend; inputs (seq, batch, heads, head_dim), output (seq, batch, heads * head_dim)."""
        wide = query.dtype if HAVE_CUDA else torch.float32
        q, k, v = (t.to(wide).permute(1, 2, 0, 3) for t in (query, key, value))
        out = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )
        return out.permute(2, 0, 1, 3).flatten(2).to(query.dtype)
