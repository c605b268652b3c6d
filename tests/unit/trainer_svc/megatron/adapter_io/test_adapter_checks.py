"""Adapters that are not the one of the settings: one clear line each, and nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import ConfigError, Incompatible
from common.peft_dir import CONFIG_FILE, WEIGHTS_FILE
from tests import tiny_models
from tests.random_adapters import adapted
from trainer_svc.megatron.lora.settings import LoraSettings

pytestmark = pytest.mark.usefixtures("ranks")

PREFIX = "base_model.model.model.layers."
K_A, V_A = (f"{PREFIX}0.self_attn.{name}_proj.lora_A.weight" for name in "kv")


def settings(**changes: Any) -> LoraSettings:
    return LoraSettings.model_validate({"rank": 4, "alpha": 12} | changes)


def change(path: Path, act: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / WEIGHTS_FILE)
    act(tensors)
    save_file(tensors, path / WEIGHTS_FILE)


def check_refused(model_dir: Path, path: Path, lora: LoraSettings, message: str) -> None:
    model = adapted(model_dir, lora, seed=99)
    before = {name: value.clone() for name, value in model.values.items()}
    with pytest.raises(Incompatible, match=message):
        model.load(path)
    assert all(torch.equal(before[name], value) for name, value in model.values.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 8, "alpha": 24}, "q_proj has rank 4 and scale 3.0, the settings 8 and 3.0"),
        ({"alpha": 6}, r"scale 3.0, the settings 4 and 1.5; set lora.rank and lora.alpha"),
        ({"use_rslora": True}, "the settings 4 and 6.0"),
        ({"rank_pattern": {"*.layers.1.*.linear_fc2": 2}}, "layers.1.mlp.down_proj has rank 4"),
        ({"alpha_pattern": {"linear_proj": 8.0}}, "o_proj has rank 4 and scale 3.0, .* 4 and 2.0"),
        (
            {"target_modules": ("linear_qkv",)},
            "has the unknown .*mlp.down_proj.*lora.target_modules",
        ),
        ({"type": "dora"}, "type is lora or canonical_lora, lora.type is dora; set lora.type"),
    ],
)
def test_an_adapter_of_other_settings_is_refused(
    tiny_dir: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    adapted(tiny_dir, settings()).exporter().to_peft_dir(tmp_path / "peft")
    check_refused(tiny_dir, tmp_path / "peft", settings(**changes), message)


def test_an_adapter_that_lacks_modules_is_refused(tiny_dir: Path, tmp_path: Path) -> None:
    lora = settings(target_modules=("linear_qkv",))
    adapted(tiny_dir, lora).exporter().to_peft_dir(tmp_path / "peft")
    check_refused(tiny_dir, tmp_path / "peft", settings(), "lacks .*mlp.down_proj")


def test_dora_is_no_lora(tiny_dir: Path, tmp_path: Path) -> None:
    adapted(tiny_dir, settings(type="dora")).exporter().to_peft_dir(tmp_path / "peft")
    check_refused(tiny_dir, tmp_path / "peft", settings(), "type is dora, lora.type is lora")


def test_dora_without_a_magnitude_is_refused(tiny_dir: Path, tmp_path: Path) -> None:
    model = adapted(tiny_dir, settings(type="dora"))
    model.exporter().to_peft_dir(tmp_path / "peft")
    name = PREFIX + "0.self_attn.o_proj.lora_magnitude_vector"
    change(tmp_path / "peft", lambda tensors: tensors.pop(name))
    with pytest.raises(ConfigError, match=r"o_proj' has only lora_A and lora_B; save all of"):
        model.load(tmp_path / "peft")


def test_a_magnitude_without_dora_is_refused(tiny_dir: Path, tmp_path: Path) -> None:
    model = adapted(tiny_dir, settings(type="dora"))
    model.exporter().to_peft_dir(tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / CONFIG_FILE).read_text())
    (tmp_path / "peft" / CONFIG_FILE).write_text(json.dumps(config | {"use_dora": False}))
    with pytest.raises(ConfigError, match="has a lora_magnitude_vector, but use_dora is not set"):
        model.load(tmp_path / "peft")


def test_projections_with_an_a_each_load_into_canonical_lora_alone(
    tiny_dir: Path, tmp_path: Path
) -> None:
    canonical = settings(type="canonical_lora")
    source = adapted(tiny_dir, canonical)
    source.exporter().to_peft_dir(tmp_path / "peft")
    message = r'layers.0.*q_proj and .*k_proj differ in lora_A, .*set lora.type = "canonical_lora"'
    check_refused(tiny_dir, tmp_path / "peft", settings(), message)
    target = adapted(tiny_dir, canonical, seed=99)
    target.load(tmp_path / "peft")
    assert torch.equal(target.logits(), source.logits())


def test_experts_with_an_adapter_each_are_no_shared_one(tmp_path: Path) -> None:
    model_dir = tiny_models.save("qwen3_moe", tmp_path / "model", num_layers=1)
    for layout, names in (
        ("per_expert", "experts.0.gate_proj and .*experts.1.gate_proj"),
        ("packed", "expert 0 of .* and expert 1 of .*"),
    ):
        path = tmp_path / layout
        adapted(model_dir, settings(expert_layout=layout)).exporter().to_peft_dir(path)
        message = f'{names} differ in lora_A, .*set lora.experts = "per_expert"'
        check_refused(model_dir, path, settings(experts="shared"), message)


def test_an_adapter_with_a_nan_is_refused(tiny_dir: Path, tmp_path: Path) -> None:
    adapted(tiny_dir, settings()).exporter().to_peft_dir(tmp_path / "peft")
    change(tmp_path / "peft", lambda tensors: tensors[V_A][0, 0].fill_(torch.nan))
    check_refused(tiny_dir, tmp_path / "peft", settings(), "v_proj.lora_A.weight .* not finite")


def test_another_models_adapter_is_refused(tiny_dir: Path, tmp_path: Path) -> None:
    model_dir = tiny_models.save("llama", tmp_path / "model", hidden_size=32)
    adapted(model_dir, settings()).exporter().to_peft_dir(tmp_path / "peft")
    message = r"has shape \(4, 32\), the model \(4, 64\); use an adapter of this base model"
    check_refused(tiny_dir, tmp_path / "peft", settings(), message)


def test_a_missing_adapter_is_a_config_error(tiny_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none/adapter_config.json: no such file"):
        adapted(tiny_dir, settings()).load(tmp_path / "none")
