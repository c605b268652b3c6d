from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.adapter import Dtype
from common.peft_dir import CONFIG_FILE
from common.stream.verifier import Verifier
from tests import tiny_models
from tests.random_adapters import Adapted, adapted, tensors
from trainer_svc.megatron.adapter_io.flat import TORCH_DTYPES
from trainer_svc.megatron.lora.policies import PolicyAdapters
from trainer_svc.megatron.lora.settings import LoraSettings

pytestmark = pytest.mark.usefixtures("ranks")

PREFIX = "base_model.model.model.layers."


def settings(**changes: Any) -> LoraSettings:
    return LoraSettings.model_validate({"rank": 4, "alpha": 12} | changes)


def exported(model: Adapted, path: Path, *, dtype: Dtype | None = None) -> dict[str, Tensor]:
    return tensors(model.export(path, dtype=dtype), path)


def test_an_export_only_reads_the_trainers_tensors(tiny_dir: Path, tmp_path: Path) -> None:
    """faults.md 9: the trainer's own tensors were scaled in place."""
    model = adapted(tiny_dir, settings(alpha_pattern={"linear_qkv": 5.0}))
    before = {name: value.clone() for name, value in model.values.items()}
    first = model.export(tmp_path / "one")
    second = model.export(tmp_path / "two")
    assert all(torch.equal(before[name], value) for name, value in model.values.items())
    assert first == second
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_the_file_is_the_flat_buffer_and_shared_a_lies_in_it_once(
    tiny_dir: Path, tmp_path: Path
) -> None:
    """faults.md 3, verl#7014: the digests are those of what was written."""
    manifest = adapted(tiny_dir, settings()).export(tmp_path / "flat")
    content = (tmp_path / "flat").read_bytes()
    # A of qkv, proj, fc1, fc2 and B of q, k, v, o, gate, up, down, of two layers in float32.
    floats = 2 * 4 * ((64 + 128 + 64 + 80) + (128 + 64 + 64 + 64 + 80 + 80 + 64))
    assert len(content) == manifest.total_bytes == 4 * floats
    Verifier(manifest).update(content)
    aliases = {spec.name: spec.alias_of for spec in manifest.tensors if spec.alias_of}
    layer = PREFIX + "0."
    assert len(aliases) == 2 * 3
    assert aliases[layer + "self_attn.v_proj.lora_A.weight"] == (
        layer + "self_attn.q_proj.lora_A.weight"
    )
    assert aliases[layer + "mlp.up_proj.lora_A.weight"] == layer + "mlp.gate_proj.lora_A.weight"
    assert manifest.lora is not None
    assert manifest.lora.target_modules == (
        *("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"),
    )
    assert (manifest.lora.rank, manifest.lora.alpha) == (4, 12.0)


def test_an_adapter_that_all_experts_share_is_sent_once(tmp_path: Path) -> None:
    model_dir = tiny_models.save("qwen3_moe", tmp_path / "model", num_layers=1)
    lora = settings(experts="shared", target_modules=("linear_fc1", "linear_fc2"))
    manifest = adapted(model_dir, lora).export(tmp_path / "flat")
    # A of fc1 and fc2; B of gate, up and down.
    assert manifest.total_bytes == 4 * 4 * ((64 + 24) + (24 + 24 + 64))
    owners = {spec.name for spec in manifest.tensors if not spec.alias_of}
    assert len(owners) == 5
    assert all(".experts.0." in name for name in owners)
    assert len(manifest.tensors) == 4 * 3 * 2


def test_gate_and_up_each_get_their_own_rows(tiny_dir: Path, tmp_path: Path) -> None:
    """faults.md 9, unsloth-zoo#941: gate was loaded twice, up never."""
    model = adapted(tiny_dir, settings())
    found = exported(model, tmp_path / "flat")
    fused = model.values["decoder.layers.1.mlp.linear_fc1.0.lora_b"]
    assert torch.equal(found[PREFIX + "1.mlp.gate_proj.lora_B.weight"], fused[:80])
    assert torch.equal(found[PREFIX + "1.mlp.up_proj.lora_B.weight"], fused[80:])


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_every_row_of_fused_attention_lands_in_its_slot(tmp_path: Path, kind: str) -> None:
    """faults.md 12, Megatron-Bridge#1818: heads 8, groups 2, head_dim 4, B = arange."""
    shape = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 32}
    model_dir = tiny_models.save("llama", tmp_path / "model", num_layers=1, **shape)
    model = adapted(model_dir, settings(rank=1, type=kind, target_modules=("linear_qkv",)))
    qkv = "decoder.layers.0.self_attention.linear_qkv.0."
    for name, value in model.values.items():
        if not name.endswith("lora_a"):
            value.copy_(torch.arange(48.0).view_as(value))
    assert model.values[qkv + "lora_b"].shape == (48, 1)
    found = exported(model, tmp_path / "flat")
    expected = {
        "q": [*range(0, 16), *range(24, 40)],
        "k": [*range(16, 20), *range(40, 44)],
        "v": [*range(20, 24), *range(44, 48)],
    }
    for leaf in ("lora_B.weight", *(["lora_magnitude_vector"] if kind == "dora" else [])):
        for projection, rows in expected.items():
            tensor = found[f"{PREFIX}0.self_attn.{projection}_proj.{leaf}"]
            assert tensor.flatten().tolist() == rows, (leaf, projection)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("dtype", list(Dtype))
def test_the_wire_type_is_one_rounding(
    tiny_dir: Path, tmp_path: Path, dtype: Dtype, kind: str
) -> None:
    """faults.md 17, verl#3675."""
    model = adapted(tiny_dir, settings(type=kind))
    manifest = model.export(tmp_path / "flat", dtype=dtype)
    assert {spec.dtype for spec in manifest.tensors} == {dtype}
    found = tensors(manifest, tmp_path / "flat")
    own = model.values["decoder.layers.0.self_attention.linear_proj.0.lora_b"]
    name = PREFIX + "0.self_attn.o_proj.lora_B.weight"
    assert torch.equal(found[name], own.to(TORCH_DTYPES[dtype]))


def test_a_bfloat16_adapter_travels_as_it_is(tiny_dir: Path, tmp_path: Path) -> None:
    """faults.md 17."""
    model = adapted(tiny_dir, settings(dtype="bfloat16"))
    found = exported(model, tmp_path / "flat")
    own = model.values["decoder.layers.0.mlp.linear_fc2.0.lora_a"]
    assert own.dtype is torch.bfloat16
    assert torch.equal(found[PREFIX + "0.mlp.down_proj.lora_A.weight"], own)


MIXED = {
    "rank_pattern": {"*.layers.1.*.linear_qkv": 8, "linear_proj": 2},
    "alpha_pattern": {"linear_fc2": 3.0},
}


@pytest.mark.parametrize("use_rslora", [False, True])
def test_replicas_get_one_rank_and_one_scale(
    tiny_dir: Path, tmp_path: Path, use_rslora: bool
) -> None:
    """An engine that knows one scale an adapter applies what each module was trained with."""
    model = adapted(tiny_dir, settings(use_rslora=use_rslora, **MIXED))
    manifest = model.export(tmp_path / "flat")
    lora, found = manifest.lora, tensors(manifest, tmp_path / "flat")
    assert lora is not None
    assert (lora.rank, lora.rank_pattern, lora.alpha_pattern) == (8, (), ())
    assert lora.scale == pytest.approx(12 / (2 if use_rslora else 4))
    for name, rank, scale in (
        ("0.self_attn.o_proj", 2, 12 / (2**0.5 if use_rslora else 2)),
        ("1.self_attn.q_proj", 8, 12 / (8**0.5 if use_rslora else 8)),
        ("1.mlp.down_proj", 4, 3 / (2 if use_rslora else 4)),
        ("0.mlp.gate_proj", 4, 12 / (2 if use_rslora else 4)),
    ):
        a, b = (found[f"{PREFIX}{name}.lora_{factor}.weight"] for factor in "AB")
        assert a.shape[0] == b.shape[1] == rank
        served = lora.scale * b @ a
        plain = _delta(model, name) * scale
        torch.testing.assert_close(served, plain, atol=1e-6, rtol=1e-6)
    unchanged = model.values["decoder.layers.0.mlp.linear_fc1.0.lora_b"]
    assert torch.equal(found[PREFIX + "0.mlp.gate_proj.lora_B.weight"], unchanged[:80])


def _delta(model: Adapted, name: str) -> Tensor:
    """B A of a module that is one, or of the first rows of a fused one."""
    layer, _, projection = name.split(".")
    linear, rows = {
        "o_proj": ("self_attention.linear_proj", 64),
        "q_proj": ("self_attention.linear_qkv", 0),
        "down_proj": ("mlp.linear_fc2", 64),
        "gate_proj": ("mlp.linear_fc1", 80),
    }[projection]
    a, b = (model.values[f"decoder.layers.{layer}.{linear}.0.lora_{factor}"] for factor in "ab")
    if projection == "q_proj":  # two groups of 2 query heads, a key and a value head of 32 rows
        b = torch.cat([b[:64], b[128:192]])
        rows = 128
    return b[:rows] @ a


def test_the_served_change_is_linear_in_alpha(tiny_dir: Path, tmp_path: Path) -> None:
    """faults.md 14, verl#5325: alpha = 0, or another run's, was served."""
    changes = []
    for alpha in (12.0, 24.0):
        lora = settings(alpha=alpha, alpha_pattern={"linear_fc2": alpha / 4})
        model = adapted(tiny_dir, lora)
        manifest = model.export(tmp_path / str(alpha))
        found = tensors(manifest, tmp_path / str(alpha))
        assert manifest.lora is not None
        names = [PREFIX + f"0.mlp.{name}.lora_B.weight" for name in ("down_proj", "up_proj")]
        changes.append([manifest.lora.scale * found[name] for name in names])
    for single, double in zip(*changes, strict=True):
        assert torch.equal(2 * single, double)
    with pytest.raises(ValueError, match="greater than 0"):
        settings(alpha=0)


def test_a_directory_keeps_patterns_and_every_bit(tiny_dir: Path, tmp_path: Path) -> None:
    model = adapted(tiny_dir, settings(**MIXED))
    model.exporter().to_peft_dir(tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / CONFIG_FILE).read_text())
    attention = "model.layers.1.self_attn.{}_proj"
    assert config["rank_pattern"] == {attention.format(p): 8 for p in "qkv"} | {"o_proj": 2}
    assert config["alpha_pattern"] == {"down_proj": 3.0}


def test_each_policy_is_exported_by_its_name(tiny_dir: Path, tmp_path: Path) -> None:
    model = adapted(tiny_dir, settings())
    policies = PolicyAdapters(model.base.chunks, masters=model.values)
    policies.add_adapter("old")
    exporter = model.exporter()
    exporter.to_file(tmp_path / "first", base_fingerprint="base")
    for value in model.values.values():
        value.add_(1.0)
    exporter.to_file(tmp_path / "old", base_fingerprint="base", adapter="old")
    exporter.to_file(tmp_path / "new", base_fingerprint="base")
    assert (tmp_path / "old").read_bytes() == (tmp_path / "first").read_bytes()
    assert (tmp_path / "new").read_bytes() != (tmp_path / "first").read_bytes()
