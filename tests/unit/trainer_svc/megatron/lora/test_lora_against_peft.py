"""Logits, loss and adapter gradients in float32, on one rank, against Hugging Face and PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny_models
from tests.adapter_twins import Outcome, next_token_loss, with_formulas, with_peft
from trainer_svc.megatron.lora.layers import add_lora, trained_tensors
from trainer_svc.megatron.lora.plan import plan_adapter
from trainer_svc.megatron.lora.settings import LoraSettings
from trainer_svc.megatron.model.build import BaseModel, build_model
from trainer_svc.megatron.model.forward import hidden_states, output_logits
from trainer_svc.megatron.model.layout import causal_layout

pytestmark = pytest.mark.usefixtures("ranks")

TOKENS = (torch.arange(40) * 37) % tiny_models.VOCAB_SIZE
DENSE = ["llama", "llama_tied", "llama3", "llama_yarn", "mistral", "qwen2", "qwen3", "qwen3_yarn"]
SPARSE = ["qwen3_moe", "qwen3_moe_unnormed", "mixtral"]
LATENT = ["deepseek_v2", "deepseek_v2_grouped", "deepseek_v3"]
OUTSIDE_EXPERTS = {"exclude_modules": ["*.experts.*"]}

Twin = Callable[..., Outcome]


def tiny(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.getbasetemp() / f"twin_{name}"
    return path if path.exists() else tiny_models.save(name, path)


def fill(base: BaseModel) -> dict[str, Tensor]:
    """Give B and magnitudes values as training would; all values by name."""
    generator = torch.Generator().manual_seed(11)
    tensors = trained_tensors(base.chunks)
    for tensor in tensors:
        noise = torch.randn(tensor.parameter.shape, generator=generator)
        if not tensor.name.endswith("lora_a"):
            tensor.parameter.data.add_(noise, alpha=0.05)
    return {tensor.name: tensor.parameter.detach().clone() for tensor in tensors}


def check(
    name: str, settings: dict[str, Any], twin: Twin, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model_dir = tiny(name, tmp_path_factory)
    base = build_model(model_dir, dtype=torch.float32)
    plan = plan_adapter(base.config, LoraSettings.model_validate({"rank": 4} | settings))
    add_lora(base, plan=plan, seed=5)
    values = fill(base)
    expected = twin(model_dir, base=base.config, plan=plan, values=values, tokens=TOKENS)

    hidden = hidden_states(base.chunks[0], TOKENS, layout=causal_layout([len(TOKENS)]))
    logits = output_logits(base.chunks[0], hidden).flatten(0, 1)
    loss = next_token_loss(logits, TOKENS)
    torch.autograd.backward(loss)
    torch.testing.assert_close(logits, expected.logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(loss, expected.loss, atol=1e-5, rtol=0)
    for tensor in trained_tensors(base.chunks):
        gradient = tensor.parameter.grad
        assert gradient is not None
        wanted = expected.gradients[tensor.name]
        assert (gradient - wanted).norm() <= 1e-4 * wanted.norm(), tensor.name


@pytest.mark.parametrize("kind", ["lora", "canonical_lora", "dora"])
@pytest.mark.parametrize("name", DENSE)
def test_dense_models(name: str, kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check(name, {"type": kind}, with_peft, tmp_path_factory)


@pytest.mark.parametrize("kind", ["lora", "canonical_lora", "dora"])
@pytest.mark.parametrize("name", SPARSE + LATENT)
def test_linears_outside_experts(
    name: str, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Attention, latent attention, shared experts and dense layers of models with experts."""
    check(name, {"type": kind} | OUTSIDE_EXPERTS, with_peft, tmp_path_factory)


@pytest.mark.parametrize("name", SPARSE + LATENT)
def test_an_adapter_for_each_expert_and_the_router(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = {"target_modules": ["linear_*", "router"]}
    check(name, settings, with_peft, tmp_path_factory)


@pytest.mark.parametrize(
    "settings",
    [
        {"type": "canonical_lora"},
        {"type": "dora"},
        {"experts": "shared"},
        {"experts": "shared", "type": "canonical_lora"},
        {"target_modules": ["router"], "type": "dora"},
    ],
)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_adapters_of_experts_that_peft_has_not(
    name: str, settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """PEFT adapts stacked experts as a whole, with neither DoRA nor a part of their rows."""
    check(name, settings, with_formulas, tmp_path_factory)


PATTERNS: dict[str, Any] = {
    "rank_pattern": {"*.layers.0.*.linear_qkv": 2, "linear_fc2": 6},
    "alpha_pattern": {"linear_proj": 3.0, "linear_qkv": 5.0},
}
PROJECTION_PATTERNS: dict[str, Any] = {
    "rank_pattern": {"*.layers.0.*.linear_k": 2, "linear_fc1_up": 6},
    "alpha_pattern": {"linear_v": 3.0, "linear_fc1": 5.0},
}


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        PATTERNS,
        PATTERNS | {"use_rslora": True, "type": "dora"},
        PROJECTION_PATTERNS | {"type": "canonical_lora"},
        {"type": "canonical_lora", "target_modules": ["linear_q", "linear_v", "linear_fc1_up"]},
        {"target_modules": ["linear_qkv"], "exclude_modules": ["*.layers.0.*"]},
        {"a_init": "kaiming", "b_init": "normal"},
    ],
)
def test_scales_patterns_and_targets(
    settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    check("qwen2", settings, with_peft, tmp_path_factory)
