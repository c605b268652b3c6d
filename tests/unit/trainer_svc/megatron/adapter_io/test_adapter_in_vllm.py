"""Exported directories through vLLM's own loader: its configuration, names, ranks and scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import PackedLoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper

from common.peft_dir import write_peft_dir
from tests import tiny_models
from tests.random_adapters import Adapted, adapted
from trainer_svc.megatron.lora.settings import LoraSettings

pytestmark = pytest.mark.usefixtures("ranks")

EXPERTS = [f"experts.{e}.{name}_proj" for e in range(4) for name in ("gate", "down", "up")]
EXPECTED = {"q_proj", "k_proj", "v_proj", "o_proj", "gate", "experts", *EXPERTS}
"""What vLLM expects of a Qwen3-MoE: the parts of packed modules, and the others by last name."""

MIXED = {"rank_pattern": {"linear_proj": 2}, "alpha_pattern": {"*.local_experts.1.*": 3.0}}


def settings(**changes: Any) -> LoraSettings:
    return LoraSettings.model_validate({"rank": 4, "alpha": 12} | changes)


def published(model: Adapted, path: Path) -> Path:
    """The directory as a replica stages it."""
    manifest = model.export(path.with_suffix(".flat"))
    content = memoryview(path.with_suffix(".flat").read_bytes())
    return write_peft_dir(path, manifest, content)


def load(path: Path) -> LoRAModel:
    helper = PEFTHelper.from_local_dir(str(path), max_position_embeddings=None)
    assert helper._validate_features() == []
    return LoRAModel.from_local_checkpoint(
        str(path), EXPECTED, helper, lora_model_id=1, device="cpu", dtype=torch.float32
    )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"), num_layers=1)


@pytest.mark.parametrize("kind", ["published", "directory"])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_mixed_ranks_and_scales_are_applied_as_trained(
    model_dir: Path, tmp_path: Path, kind: str, use_rslora: bool
) -> None:
    model = adapted(
        model_dir,
        settings(target_modules=("linear_*", "router"), use_rslora=use_rslora, **MIXED),
    )
    path = tmp_path / "peft"
    if kind == "published":
        published(model, path)
    else:
        model.exporter().to_peft_dir(path)
    loras = load(path).loras
    for site, _, pair in model.plan.pairs():
        for projection in pair.projections:
            name = projection.name.format(expert=site.expert)
            weights = loras[f"model.layers.0.{name}"]
            assert weights.lora_a.shape == (pair.rank, site.linear.in_features)
            assert weights.lora_b.shape == (projection.out_features, pair.rank)
            applied = weights.scaling * weights.lora_b @ weights.lora_a
            rows = _rows(model, f"{site.name}.0.lora_b", projection.name)
            plain = pair.scale * rows @ model.values[f"{site.name}.0.lora_a"]
            torch.testing.assert_close(applied, plain, atol=1e-5, rtol=1e-5)
    experts = [loras[f"model.layers.0.mlp.{name}"] for name in EXPERTS]
    packed = PackedLoRALayerWeights.pack_moe(experts, "experts")
    assert packed.lora_a[0].shape == (4, 4, 64)


def _rows(model: Adapted, name: str, projection: str) -> torch.Tensor:
    """B of one projection; q, k and v have 96, 48 and 48 rows in two groups of heads of 24."""
    fused = model.values[name]
    if projection.endswith(("gate_proj", "up_proj")):
        return fused[:24] if "gate" in projection else fused[24:]
    begin, rows = {"q": (0, 48), "k": (48, 24), "v": (72, 24)}.get(projection[-6], (0, 0))
    if not rows or projection.endswith("o_proj"):
        return fused
    return torch.cat([fused[at + begin : at + begin + rows] for at in (0, 96)])


def test_the_tag_of_a_layout_is_no_hindrance(model_dir: Path, tmp_path: Path) -> None:
    model = adapted(model_dir, settings(expert_layout="flat"))
    loras = load(published(model, tmp_path / "peft")).loras
    down = loras["model.layers.0.mlp.experts"]
    for expert in range(4):
        name = f"decoder.layers.0.mlp.experts.local_experts.{expert}.linear_fc2.0.lora_"
        # As `LoRAModelManager._stack_moe_lora_weights` takes it apart.
        a = down.lora_a.reshape(4, -1, 24)[expert]
        b = down.lora_b.reshape(64, -1, 4)[..., expert]
        assert torch.equal(a, model.values[name + "a"])
        assert torch.equal(b, model.values[name + "b"])
    assert loras["model.layers.0.mlp.experts.base_layer"].lora_b.shape == (48, 16)


def test_dora_is_what_vllm_refuses(model_dir: Path, tmp_path: Path) -> None:
    model = adapted(model_dir, settings(type="dora"))
    model.exporter().to_peft_dir(tmp_path / "peft")
    helper = PEFTHelper.from_local_dir(str(tmp_path / "peft"), max_position_embeddings=None)
    assert helper._validate_features() == ["vLLM does not yet support DoRA."]
