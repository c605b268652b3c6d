"""Export to a PEFT directory and import from it: bit-identical, every type, every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from common.adapter import ExpertLayout
from common.errors import ConfigError
from common.peft_dir import CONFIG_FILE, WEIGHTS_FILE
from tests import tiny_models
from tests.random_adapters import adapted
from trainer_svc.megatron.lora.settings import LoraSettings

pytestmark = pytest.mark.usefixtures("ranks")

TYPES: dict[str, dict[str, Any]] = {
    "lora": {},
    "canonical_lora": {"type": "canonical_lora"},
    "dora": {"type": "dora"},
    "rslora": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"*.layers.1.*.linear_fc1": 2, "linear_proj": 6},
        "alpha_pattern": {"linear_fc2": 3.0},
    },
    "bfloat16": {"dtype": "bfloat16"},
    "router": {"target_modules": ("router", "linear_proj")},
    "some_experts": {"exclude_modules": ("*.local_experts.2.*",)},
    "shared": {"experts": "shared"},
}
PACKED = (ExpertLayout.PACKED, ExpertLayout.FLAT, ExpertLayout.SWAPPED)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    names = ("qwen3_moe", "mixtral", "deepseek_v3")
    return {name: tiny_models.save(name, root / name) for name in names}


def settings(**changes: Any) -> LoraSettings:
    return LoraSettings.model_validate({"rank": 4, "alpha": 12} | changes)


def check_round_trip(model_dir: Path, path: Path, lora: LoraSettings) -> None:
    source, target = adapted(model_dir, lora), adapted(model_dir, lora, seed=99)
    wanted, found = source.values, target.values
    assert not any(torch.equal(wanted[name], found[name]) for name in wanted)
    source.exporter().to_peft_dir(path)
    target.load(path)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


@pytest.mark.parametrize("name", TYPES)
def test_every_type_comes_back_bit_for_bit(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    check_round_trip(models["qwen3_moe"], tmp_path / "peft", settings(**TYPES[name]))


@pytest.mark.parametrize("layout", PACKED)
@pytest.mark.parametrize("experts", ["per_expert", "shared"])
def test_every_expert_layout_comes_back_bit_for_bit(
    models: dict[str, Path], tmp_path: Path, layout: ExpertLayout, experts: str
) -> None:
    lora = settings(expert_layout=layout, experts=experts, alpha_pattern={"linear_fc1": 3.0})
    check_round_trip(models["mixtral"], tmp_path / "peft", lora)


@pytest.mark.parametrize("architecture", ["mixtral", "deepseek_v3"])
def test_every_architecture_with_experts_comes_back(
    models: dict[str, Path], tmp_path: Path, architecture: str
) -> None:
    lora = settings(target_modules=("linear_*", "router"))
    check_round_trip(models[architecture], tmp_path / "peft", lora)


@pytest.mark.parametrize("layout", PACKED)
def test_a_layout_loads_whatever_the_settings_export(
    models: dict[str, Path], tmp_path: Path, layout: ExpertLayout
) -> None:
    source = adapted(models["qwen3_moe"], settings(expert_layout=layout))
    source.exporter().to_peft_dir(tmp_path / "peft")
    target = adapted(models["qwen3_moe"], settings(), seed=99)
    target.load(tmp_path / "peft")
    assert all(torch.equal(source.values[name], value) for name, value in target.values.items())


def test_where_sizes_agree_only_the_tag_tells(tmp_path: Path) -> None:
    """down_proj is square, and 16 experts of rank 4 are as wide: all its tensors are (64, 64)."""
    square = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 16}
    model_dir = tiny_models.save("qwen3_moe", tmp_path / "model", num_layers=1, **square)
    down = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
    stored = {}
    for layout in ("flat", "swapped"):
        source = adapted(model_dir, settings(expert_layout=layout))
        source.exporter().to_peft_dir(tmp_path / layout)
        stored[layout] = load_file(tmp_path / layout / WEIGHTS_FILE)[down]
        target = adapted(model_dir, settings(), seed=99)
        target.load(tmp_path / layout)
        assert all(torch.equal(source.values[n], value) for n, value in target.values.items())
    assert stored["flat"].shape == stored["swapped"].shape == (64, 64)
    assert not torch.equal(stored["flat"], stored["swapped"])


def _with_tag(source: Path, target: Path, metadata: dict[str, str]) -> Path:
    target.mkdir()
    (target / CONFIG_FILE).write_text((source / CONFIG_FILE).read_text())
    tensors = load_file(source / WEIGHTS_FILE)
    save_file(tensors, target / WEIGHTS_FILE, metadata={"format": "pt"} | metadata)
    return target


def test_the_tag_lies_in_the_metadata_and_peft_gets_its_parameters(
    models: dict[str, Path], tmp_path: Path
) -> None:
    model = adapted(models["qwen3_moe"], settings(expert_layout="flat"))
    model.exporter(base_model_name="base").to_peft_dir(tmp_path / "peft")
    with safe_open(tmp_path / "peft" / WEIGHTS_FILE, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "expert_layout": "flat"}
    config = json.loads((tmp_path / "peft" / CONFIG_FILE).read_text())
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert config["target_parameters"] == ["experts.gate_up_proj", "experts.down_proj"]
    assert config["base_model_name_or_path"] == "base"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "do not tell whether the experts' factors lie flat or swapped"),
        ({"expert_layout": "packed"}, "is of expert layout flat or swapped, .* say packed"),
        ({"expert_layout": "per_expert"}, "is of expert layout flat or swapped"),
        ({"expert_layout": "Flat"}, "expert_layout = 'Flat'; use one of per_expert, packed"),
    ],
)
def test_what_names_and_tag_leave_open_is_refused(
    models: dict[str, Path], tmp_path: Path, metadata: dict[str, str], message: str
) -> None:
    model = adapted(models["qwen3_moe"], settings(expert_layout="flat"))
    model.exporter().to_peft_dir(tmp_path / "peft")
    untagged = _with_tag(tmp_path / "peft", tmp_path / "other", metadata)
    with pytest.raises(ConfigError, match=message):
        model.load(untagged)


def test_without_a_tag_names_decide_where_they_can(models: dict[str, Path], tmp_path: Path) -> None:
    for layout in ("packed", "per_expert"):
        source = adapted(models["qwen3_moe"], settings(expert_layout=layout))
        source.exporter().to_peft_dir(tmp_path / layout)
        untagged = _with_tag(tmp_path / layout, tmp_path / f"{layout}_untagged", {})
        target = adapted(models["qwen3_moe"], settings(), seed=99)
        target.load(untagged)
        assert all(torch.equal(source.values[n], value) for n, value in target.values.items())


def test_a_checkpoint_is_read_at_its_adapter(models: dict[str, Path], tmp_path: Path) -> None:
    source = adapted(models["mixtral"], settings())
    source.exporter().to_peft_dir(tmp_path / "adapter")
    target = adapted(models["mixtral"], settings(), seed=99)
    target.load(tmp_path)
    assert all(torch.equal(source.values[name], value) for name, value in target.values.items())


def test_a_fused_adapter_loads_into_canonical_lora(models: dict[str, Path], tmp_path: Path) -> None:
    fused = adapted(models["qwen3_moe"], settings())
    fused.exporter().to_peft_dir(tmp_path / "peft")
    canonical = adapted(models["qwen3_moe"], settings(type="canonical_lora"), seed=99)
    canonical.load(tmp_path / "peft")
    torch.testing.assert_close(canonical.logits(), fused.logits(), atol=1e-5, rtol=0)
    shared = adapted(models["qwen3_moe"], settings(experts="shared"))
    shared.exporter().to_peft_dir(tmp_path / "shared")
    each = adapted(models["qwen3_moe"], settings(), seed=99)
    each.load(tmp_path / "shared")
    torch.testing.assert_close(each.logits(), shared.logits(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "dora"}, "it has no tensor for DoRA's magnitudes; use per_expert"),
        ({"type": "canonical_lora"}, "gate and up have an adapter each"),
        ({"exclude_modules": ("*.local_experts.2.*",)}, "only 3 experts of layer 0"),
        ({"rank_pattern": {"*.local_experts.2.*": 2}}, "layer 0's experts differ in rank"),
        ({"alpha_pattern": {"*.local_experts.2.*": 2}}, "layer 0's experts differ in alpha"),
        ({"target_modules": ("linear_fc2",)}, "of layer 0 only linear_fc2 has an adapter"),
    ],
)
def test_what_one_tensor_cannot_hold_is_refused_at_the_start(
    models: dict[str, Path], changes: dict[str, Any], message: str
) -> None:
    model = adapted(models["qwen3_moe"], settings(expert_layout="flat", **changes))
    with pytest.raises(ConfigError, match=f"lora.expert_layout: found flat, but .*{message}"):
        model.exporter()
