"""Core attention of one row of tokens on torch's kernels, as its layout says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from trainer_svc.megatron import device
from trainer_svc.megatron.model.attention_plan import AttentionBlock, attention_plan


class LayoutAttention(torch.nn.Module):
    """Attention over a `layout` (see `layout.py`), which comes as Megatron's attention mask.

    Megatron's own draws its dropout from a CUDA generator and holds all scores in memory; one
    kernel call over the whole row would compute every pair of strangers. On a CPU the arithmetic
    is in float32: the backward pass of short sequences takes a third of bfloat16's time.
    """

    def __init__(self, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        """Attend; all (T, 1, heads, head_dim), key and value with fewer heads if they are grouped.

        Args:
            attention_mask: the layout.

        Returns:
            (T, 1, heads * head_dim of `value`).
        """
        plan = attention_plan(attention_mask, device=query.device)
        wide = query.dtype if device.HAVE_CUDA else torch.float32
        q, k, v = (t.squeeze(1).to(wide) for t in (query, key, value))
        parts = [self._attend(block, q, k, v) for block in plan.blocks]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if plan.order is not None:
            out = out.index_select(0, plan.order)
        return out.unsqueeze(1).to(query.dtype)

    def _attend(self, block: AttentionBlock, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Outputs (rows * width, heads * head_dim) of one block's queries."""
        q, k, v = (
            _take(t, where, rows=block.rows).transpose(1, 2)
            for t, where in ((q, block.queries), (k, block.keys), (v, block.keys))
        )
        width = v.shape[-1]
        if width < q.shape[-1]:
            # The kernels that hold no scores want one head_dim for all three.
            v = pad(v, (0, q.shape[-1] - width))
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=block.mask,
            is_causal=block.mask is None,
            scale=self.softmax_scale,
            enable_gqa=True,
        )
        return out[..., :width].transpose(1, 2).reshape(-1, q.shape[1] * width)


def _take(tensor: Tensor, where: slice | Tensor, *, rows: int) -> Tensor:
    """(rows, width, heads, head_dim) out of (T, heads, head_dim)."""
    chosen = tensor[where] if isinstance(where, slice) else tensor.index_select(0, where)
    return chosen.view(rows, -1, *tensor.shape[1:])
