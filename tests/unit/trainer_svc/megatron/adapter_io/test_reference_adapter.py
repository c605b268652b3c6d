"""The base alone as an adapter: small, all zeros, and taken by the wire and by PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from common.adapter import AdapterRef, Dtype, Manifest
from common.peft_dir import write_peft_dir
from common.wire import ManifestReader, manifest_to_proto
from tests import tiny_models
from trainer_svc.megatron.adapter_io.lora_config import exact_config
from trainer_svc.megatron.adapter_io.places import entries, pieces
from trainer_svc.megatron.adapter_io.reference import reference_buffer, reference_manifest
from trainer_svc.megatron.lora.plan import AdapterPlan, plan_adapter
from trainer_svc.megatron.lora.settings import LoraSettings
from trainer_svc.megatron.model.architectures import read_base_config
from trainer_svc.megatron.model.base_config import BaseConfig

LORA: dict[str, dict[str, Any]] = {
    "lora": {"rank": 8, "alpha": 16},
    "rslora_patterns": {
        "use_rslora": True,
        "rank_pattern": {"linear_qkv": 2},
        "alpha_pattern": {"linear_fc2": 3},
    },
    "dora": {"type": "dora"},
    "canonical": {"type": "canonical_lora", "target_modules": ["linear_q", "linear_fc1_up"]},
}


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: tiny_models.save(name, root / name) for name in ("llama", "qwen3_moe")}


def planned(model_dir: Path, lora: dict[str, Any]) -> tuple[AdapterPlan, BaseConfig]:
    base = read_base_config(model_dir)
    return plan_adapter(base, LoraSettings.model_validate(lora)), base


def reference(model_dir: Path, lora: dict[str, Any], dtype: Dtype = Dtype.BFLOAT16) -> Manifest:
    plan, base = planned(model_dir, lora)
    return reference_manifest(plan, base=base, base_fingerprint="base", dtype=dtype)


@pytest.mark.parametrize("lora", LORA.values(), ids=LORA)
@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_it_is_on_the_modules_of_the_trained_adapter(
    model_dirs: dict[str, Path], model: str, lora: dict[str, Any]
) -> None:
    plan, base = planned(model_dirs[model], lora)
    manifest = reference(model_dirs[model], lora)
    own = pieces(plan, base, experts=plan.settings.expert_layout)
    factors = {e.name for e in entries(own, dtype=Dtype.BFLOAT16) if "magnitude" not in e.name}
    assert {spec.name for spec in manifest.tensors} == factors
    assert manifest.lora is not None
    assert manifest.lora.target_modules == exact_config(plan, own).target_modules
    assert (manifest.lora.rank, manifest.lora.scale) == (1, 1.0)
    assert not (manifest.lora.use_dora or manifest.lora.rank_pattern or manifest.lora.alpha_pattern)
    assert manifest.base_fingerprint == "base"


def test_tensors_of_one_shape_are_sent_once(model_dirs: dict[str, Path]) -> None:
    manifest = reference(model_dirs["llama"], LORA["lora"])
    owners = [spec for spec in manifest.tensors if not spec.alias_of]
    assert len(manifest.tensors) == 2 * 7 * 2
    assert sorted(spec.shape for spec in owners if spec.name.endswith("lora_A.weight")) == [
        (1, 64),
        (1, 80),
        (1, 128),
    ]
    assert sorted(spec.shape for spec in owners if spec.name.endswith("lora_B.weight")) == [
        (64, 1),
        (80, 1),
        (128, 1),
    ]
    assert manifest.total_bytes == 2 * 2 * (64 + 80 + 128)
    assert reference_buffer(manifest) == bytes(manifest.total_bytes)


@pytest.mark.parametrize("layout", ["per_expert", "packed", "flat", "swapped"])
def test_the_wire_takes_it(model_dirs: dict[str, Path], layout: str) -> None:
    manifest = reference(model_dirs["qwen3_moe"], {"expert_layout": layout})
    ref = AdapterRef("run", "reference", 1, manifest.digest())
    message, pages = manifest_to_proto(ref, manifest)
    reader = ManifestReader(message)
    for page in pages:
        reader.add(page)
    assert reader.manifest() == manifest


@pytest.mark.parametrize("name", ["lora", "dora", "canonical"])
def test_peft_computes_the_base_with_it(
    model_dirs: dict[str, Path], tmp_path: Path, name: str
) -> None:
    manifest = reference(model_dirs["llama"], LORA[name], Dtype.FLOAT32)
    write_peft_dir(tmp_path / "reference", manifest, reference_buffer(manifest))
    model = tiny_models.load(model_dirs["llama"])
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        alone = model(tokens).logits
        adapted = PeftModel.from_pretrained(model, str(tmp_path / "reference"))(tokens).logits
    assert torch.equal(adapted, alone)
