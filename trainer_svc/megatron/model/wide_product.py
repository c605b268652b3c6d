"""A product with a frozen weight whose result is in float32, at the price of the weight's type."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_ROWS = 4096
"""Rows of the weight that are widened at a time: few enough to stay in a cache."""


def wide_product(inputs: Tensor, weight: Tensor) -> Tensor:
    """inputs (n, in) times weight (out, in) transposed, summed and returned in float32: (n, out).

    The gradient of `inputs` is summed in float32 too, from one rounded to the weight's type; the
    weight gets none, and is the only thing that is kept.
    """
    product: Tensor = _WideProduct.apply(inputs, weight)  # type: ignore[no-untyped-call]
    return product


class _WideProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.dtype = inputs.dtype
        if torch.float32 in (inputs.dtype, weight.dtype):
            return inputs.float() @ weight.float().t()
        if weight.is_cuda:
            return torch.mm(inputs, weight.t(), out_dtype=torch.float32)
        return _on_cpu(inputs, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return (gradient.to(weight.dtype) @ weight).to(ctx.dtype), None


def _on_cpu(inputs: Tensor, weight: Tensor) -> Tensor:
    """Of bfloat16 factors, on whatever unit multiplies these: products are exact in float32.

    No operator takes bfloat16 and gives float32, but one of float32 may round its factors to
    bfloat16 first, which changes nothing in these.
    """
    product = inputs.new_empty(len(inputs), len(weight), dtype=torch.float32)
    wide = inputs.float()
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        for start in range(0, len(weight), _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            torch.mm(wide, weight[rows].float().t(), out=product[:, rows])
    finally:
        setting.fp32_precision = before
    return product
