from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from trainer_svc.megatron.lora.layers import (
    LoraLinear,
    adapters_off,
    add_lora,
    lora_modules,
    trainable_parameters,
)
from trainer_svc.megatron.model.build import build_model, hidden_states, output_logits
from trainer_svc.megatron.settings import LoraSettings

pytestmark = pytest.mark.usefixtures("ranks")

TOKENS = torch.arange(12).view(2, 6)


def adapted(
    tiny_dir: Path, settings: LoraSettings, *, dtype: torch.dtype = torch.float32
) -> GPTModel:
    model = build_model(tiny_dir, dtype=dtype)
    add_lora(model, settings=settings, seed=5)
    return model


def fill_b(model: GPTModel) -> None:
    """Give every B values, as training would."""
    generator = torch.Generator().manual_seed(11)
    for _, _, module in lora_modules(model):
        torch.nn.init.normal_(module.lora_b, std=0.1, generator=generator)


def logits(model: GPTModel) -> Tensor:
    return output_logits(model, hidden_states(model, TOKENS))


def test_gradients_reach_all_adapters_and_nothing_else(tiny_dir: Path) -> None:
    model = adapted(tiny_dir, LoraSettings(rank=4))
    fill_b(model)
    torch.autograd.backward(logits(model).square().mean())
    with_grad = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_grad == {n for n, _ in model.named_parameters() if n.endswith(("lora_a", "lora_b"))}
    assert len(trainable_parameters(model)) == len(with_grad) == 2 * 4 * 2
    assert all(p.grad.abs().sum() > 0 for p in trainable_parameters(model) if p.grad is not None)


def test_a_new_adapter_leaves_the_base_as_it_is(tiny_dir: Path) -> None:
    base = logits(build_model(tiny_dir, dtype=torch.float32))
    assert torch.equal(logits(adapted(tiny_dir, LoraSettings(rank=4))), base)


def test_adapters_off_is_the_base_and_ends_with_the_block(tiny_dir: Path) -> None:
    base = logits(build_model(tiny_dir, dtype=torch.float32))
    model = adapted(tiny_dir, LoraSettings(rank=4))
    fill_b(model)
    trained = logits(model)
    assert (trained - base).abs().max() > 0.01
    with adapters_off(model), adapters_off(model):
        assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), trained)


def test_adapters_come_back_after_an_error(tiny_dir: Path) -> None:
    model = adapted(tiny_dir, LoraSettings(rank=4))
    with pytest.raises(ZeroDivisionError), adapters_off(model):
        raise ZeroDivisionError
    assert all(module.enabled for _, _, module in lora_modules(model))


def test_output_is_base_plus_scaled_b_a_x(tiny_dir: Path) -> None:
    model = adapted(tiny_dir, LoraSettings(rank=4, alpha=6))
    fill_b(model)
    x = torch.randn(3, 2, 64)
    for _, _, module in lora_modules(model):
        x = torch.randn(3, 2, module.lora_a.shape[1])
        expected = module.base(x)[0] + 1.5 * (x @ module.lora_a.t() @ module.lora_b.t())
        torch.testing.assert_close(module(x)[0], expected)


def test_the_change_is_linear_in_alpha(tiny_dir: Path) -> None:
    """faults.md 14."""
    changes = []
    for alpha in (1.0, 2.0, 4.0):
        model = adapted(tiny_dir, LoraSettings(rank=4, alpha=alpha))
        fill_b(model)
        module = model.get_submodule("decoder.layers.0.mlp.linear_fc2")
        x = torch.ones(1, 1, 80)
        changes.append(module(x)[0] - module.base(x)[0])
    torch.testing.assert_close(changes[1], 2 * changes[0])
    torch.testing.assert_close(changes[2], 4 * changes[0])


def test_a_wildcard_adapts_one_module(tiny_dir: Path) -> None:
    settings = LoraSettings(rank=4, target_modules=("*.layers.1.*.linear_qkv",))
    model = adapted(tiny_dir, settings)
    assert [(layer, linear) for layer, linear, _ in lora_modules(model)] == [
        (1, "self_attention.linear_qkv")
    ]
    assert not isinstance(
        model.get_submodule("decoder.layers.0.self_attention.linear_qkv"), LoraLinear
    )


def test_float32_adapters_train_on_a_bfloat16_base(tiny_dir: Path) -> None:
    model = adapted(tiny_dir, LoraSettings(rank=4), dtype=torch.bfloat16)
    fill_b(model)
    out = logits(model)
    assert model.decoder.layers[0].mlp.linear_fc1.base.weight.dtype is torch.bfloat16
    assert out.dtype is torch.float32
    torch.autograd.backward(out.square().mean())
    for parameter in trainable_parameters(model):
        assert parameter.dtype is torch.float32
        assert parameter.grad is not None
        assert parameter.grad.dtype is torch.float32


@pytest.mark.parametrize(
    ("kind", "deviation"),
    [("xavier", (2 / 68) ** 0.5), ("kaiming", 64**-0.5 / 3**0.5), ("normal", 0.25)],
)
def test_a_starts_with_the_deviation_of_its_init(
    tiny_dir: Path, kind: str, deviation: float
) -> None:
    settings = LoraSettings.model_validate({"rank": 4, "a_init": kind})
    modules = [m for _, _, m in lora_modules(adapted(tiny_dir, settings))]
    a = modules[0].lora_a
    assert a.shape == (4, 64)
    assert a.std().item() == pytest.approx(deviation, rel=0.15)
    assert not modules[0].lora_b.any()
    assert not torch.equal(a, modules[4].lora_a), "two layers start alike"
