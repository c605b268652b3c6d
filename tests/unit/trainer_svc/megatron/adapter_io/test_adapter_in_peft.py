"""Exported directories in PEFT over Hugging Face's model, as they are, and PEFT's own here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from common.errors import ConfigError
from common.peft_dir import WEIGHTS_FILE
from tests import tiny_models
from tests.random_adapters import TOKENS, adapted
from trainer_svc.megatron.lora.settings import LoraSettings

pytestmark = pytest.mark.usefixtures("ranks")

MIXED: dict[str, Any] = {
    "rank_pattern": {"*.layers.1.*.linear_qkv": 2, "linear_proj": 6},
    "alpha_pattern": {"linear_fc2": 3.0},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {}),
    "canonical_lora": ("llama", {"type": "canonical_lora"}),
    "dora": ("qwen2", {"type": "dora"}),
    "rslora": ("mistral", {"use_rslora": True}),
    "patterns": ("qwen3", MIXED),
    "patterns_rslora": ("llama3", MIXED | {"use_rslora": True}),
    "latent_attention": (
        "deepseek_v3",
        {"target_modules": ("*.self_attention.*",)},
    ),
    "experts": ("qwen3_moe", {}),
    "experts_canonical": ("qwen3_moe", {"type": "canonical_lora"}),
    "experts_shared": ("qwen3_moe", {"experts": "shared"}),
    "experts_mixtral": ("mixtral", {}),
    "experts_flat": ("qwen3_moe", {"expert_layout": "flat"}),
    "experts_flat_mixtral": ("mixtral", {"expert_layout": "flat"}),
    "router": ("qwen3_moe", {"target_modules": ("router", "linear_qkv")}),
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_peft_gives_megatrons_logits(name: str, tmp_path: Path) -> None:
    architecture, changes = CASES[name]
    model_dir = tiny_models.save(architecture, tmp_path / "model")
    model = adapted(model_dir, LoraSettings.model_validate({"rank": 4, "alpha": 12} | changes))
    model.exporter(base_model_name=str(model_dir)).to_peft_dir(tmp_path / "peft")

    base = tiny_models.load(model_dir)
    plain = base(TOKENS).logits
    found = PeftModel.from_pretrained(base, tmp_path / "peft")(TOKENS).logits

    assert (found - plain).abs().max() > 0.05
    torch.testing.assert_close(found, model.logits(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("use_dora", [False, True])
@torch.no_grad()
def test_what_peft_saves_is_loaded(tmp_path: Path, use_dora: bool) -> None:
    """PEFT has an A for each projection; a DoRA on the linears that are no fused ones."""
    model_dir = tiny_models.save("llama", tmp_path / "model")
    own, targets = ["linear_proj", "linear_fc2"], ["o_proj", "down_proj"]
    if not use_dora:
        own += ["linear_qkv", "linear_fc1"]
        targets += ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    config = LoraConfig(r=4, lora_alpha=12, target_modules=targets, use_dora=use_dora)
    trained = get_peft_model(tiny_models.load(model_dir), config)
    _train(trained, tmp_path / "peft")

    lora = {"type": "dora" if use_dora else "canonical_lora", "target_modules": own}
    settings = LoraSettings.model_validate({"rank": 4, "alpha": 12} | lora)
    model = adapted(model_dir, settings, seed=99)
    model.load(tmp_path / "peft")
    torch.testing.assert_close(model.logits(), trained(TOKENS).logits, atol=1e-4, rtol=0)


@torch.no_grad()
def test_parameters_that_peft_adapts_are_flat(tmp_path: Path) -> None:
    """PEFT does not say so: whoever loads its file says it in the file's metadata."""
    model_dir = tiny_models.save("qwen3_moe", tmp_path / "model")
    config = LoraConfig(
        r=4,
        lora_alpha=12,
        target_modules=["o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )
    trained = get_peft_model(tiny_models.load(model_dir), config)
    _train(trained, tmp_path / "peft")

    targets = ("linear_proj", "linear_fc1", "linear_fc2")
    model = adapted(model_dir, LoraSettings(rank=4, alpha=12, target_modules=targets), seed=99)
    with pytest.raises(ConfigError, match=r"do not tell whether .* lie flat or swapped; save it"):
        model.load(tmp_path / "peft")
    file = tmp_path / "peft" / WEIGHTS_FILE
    save_file(load_file(file), file, metadata={"format": "pt", "expert_layout": "flat"})
    model.load(tmp_path / "peft")
    torch.testing.assert_close(model.logits(), trained(TOKENS).logits, atol=1e-4, rtol=0)


def _train(model: PeftModel, path: Path) -> None:
    """Give PEFT's factors other values, and save them."""
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(str(path))
