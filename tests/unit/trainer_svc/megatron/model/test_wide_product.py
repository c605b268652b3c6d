from __future__ import annotations

import pytest
import torch

from trainer_svc.megatron.model.wide_product import wide_product


@pytest.mark.parametrize("rows", [7, 5000])
def test_of_bfloat16_it_is_the_product_in_float32(rows: int) -> None:
    """The logits' own rounding is most of what trainer and rollout disagree about."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(9, 64, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(rows, 64, generator=generator).bfloat16()
    found = wide_product(inputs, weight)
    exact = inputs.detach().double() @ weight.double().t()
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)
    assert ((inputs @ weight.t()).double() - exact).abs().max() > 1e-2
    upstream = torch.randn(9, rows, generator=generator)
    (gradient,) = torch.autograd.grad(found, inputs, upstream)
    wide = upstream @ weight.float()
    assert gradient.dtype is torch.bfloat16
    torch.testing.assert_close(gradient.float(), wide, rtol=0, atol=0.01 * float(wide.abs().max()))


def test_of_float32_both_ways_are_in_float32() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(9, 64, generator=generator).requires_grad_()
    weight = torch.randn(11, 64, generator=generator)
    found = wide_product(inputs, weight)
    assert torch.equal(found, inputs @ weight.t())
    upstream = torch.randn(9, 11, generator=generator)
    (gradient,) = torch.autograd.grad(found, inputs, upstream)
    assert torch.equal(gradient, upstream @ weight)


def test_other_products_are_rounded_as_before() -> None:
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    wide_product(torch.ones(2, 8).bfloat16(), torch.ones(3, 8).bfloat16())
    assert setting.fp32_precision == before
