from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from common.adapter import Dtype, Manifest
from common.errors import ConfigError, Incompatible
from common.peft_dir import write_peft_dir
from common.stream.verifier import Verifier
from trainer_svc.megatron.adapter_io.export import TORCH_DTYPES, export_to_file, export_to_peft_dir
from trainer_svc.megatron.adapter_io.load import load_adapter
from trainer_svc.megatron.lora.layers import add_lora, lora_modules, trainable_parameters
from trainer_svc.megatron.model.build import build_model, hidden_states, output_logits
from trainer_svc.megatron.settings import LoraSettings

pytestmark = pytest.mark.usefixtures("ranks")

LORA = LoraSettings(rank=4, alpha=12)
PREFIX = "base_model.model.model.layers."
TOKENS = torch.arange(20).view(2, 10)


def trained_model(tiny_dir: Path, *, lora: LoraSettings = LORA, seed: int = 21) -> GPTModel:
    """An adapter with every tensor random."""
    model = build_model(tiny_dir, dtype=torch.float32)
    add_lora(model, settings=lora, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for _, _, module in lora_modules(model):
        torch.nn.init.normal_(module.lora_b, std=0.1, generator=generator)
    return model


def export(model: GPTModel, path: Path, *, dtype: Dtype | None = None) -> Manifest:
    manifest = export_to_file(model, path, settings=LORA, base_fingerprint="base", dtype=dtype)
    assert manifest is not None
    return manifest


def tensors_of(manifest: Manifest, path: Path) -> dict[str, Tensor]:
    data = bytearray(path.read_bytes())
    return {
        spec.name: torch.frombuffer(
            data,
            dtype=TORCH_DTYPES[spec.dtype],
            count=spec.size_bytes // spec.dtype.itemsize,
            offset=spec.offset_bytes,
        ).view(spec.shape)
        for spec in manifest.tensors
    }


@torch.no_grad()
def test_peft_over_hugging_face_gives_megatrons_logits(tiny_dir: Path, tmp_path: Path) -> None:
    model = trained_model(tiny_dir)
    manifest = export(model, tmp_path / "flat")
    content = memoryview((tmp_path / "flat").read_bytes())
    write_peft_dir(tmp_path / "peft", manifest, content, base_model=str(tiny_dir))
    base = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    plain = base(TOKENS).logits
    found = PeftModel.from_pretrained(base, tmp_path / "peft")(TOKENS).logits
    expected = output_logits(model, hidden_states(model, TOKENS)).transpose(0, 1)
    assert (found - plain).abs().max() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_an_export_only_reads_the_trainers_tensors(tiny_dir: Path, tmp_path: Path) -> None:
    """faults.md 9: the trainer's own tensors were scaled in place."""
    model = trained_model(tiny_dir)
    before = [p.detach().clone() for p in model.parameters()]
    first = export(model, tmp_path / "one")
    second = export(model, tmp_path / "two")
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert first == second
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_the_file_is_the_flat_buffer_and_shared_a_lies_in_it_once(
    tiny_dir: Path, tmp_path: Path
) -> None:
    manifest = export(trained_model(tiny_dir), tmp_path / "flat")
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
    assert manifest.lora.target_modules == (
        *("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"),
    )
    assert (manifest.lora.rank, manifest.lora.alpha) == (4, 12.0)


def test_gate_and_up_each_get_their_own_rows(tiny_dir: Path, tmp_path: Path) -> None:
    """faults.md 9, unsloth-zoo#941: gate was loaded twice, up never."""
    model = trained_model(tiny_dir)
    found = tensors_of(export(model, tmp_path / "flat"), tmp_path / "flat")
    fused = model.get_submodule("decoder.layers.1.mlp.linear_fc1").lora_b
    assert torch.equal(found[PREFIX + "1.mlp.gate_proj.lora_B.weight"], fused[:80])
    assert torch.equal(found[PREFIX + "1.mlp.up_proj.lora_B.weight"], fused[80:])


@pytest.mark.parametrize("dtype", list(Dtype))
def test_the_wire_type_is_one_rounding(tiny_dir: Path, tmp_path: Path, dtype: Dtype) -> None:
    """faults.md 17, verl#3675."""
    model = trained_model(tiny_dir)
    manifest = export(model, tmp_path / "flat", dtype=dtype)
    assert {spec.dtype for spec in manifest.tensors} == {dtype}
    found = tensors_of(manifest, tmp_path / "flat")[PREFIX + "0.self_attn.o_proj.lora_B.weight"]
    own = model.get_submodule("decoder.layers.0.self_attention.linear_proj").lora_b
    assert torch.equal(found, own.to(TORCH_DTYPES[dtype]))


def test_a_bfloat16_adapter_travels_as_it_is(tiny_dir: Path, tmp_path: Path) -> None:
    """faults.md 17."""
    lora = LoraSettings(rank=4, alpha=12, dtype="bfloat16")
    manifest = export(trained_model(tiny_dir, lora=lora), tmp_path / "flat")
    assert {spec.dtype for spec in manifest.tensors} == {Dtype.BFLOAT16}


def test_loading_an_export_restores_every_bit(tiny_dir: Path, tmp_path: Path) -> None:
    source, target = trained_model(tiny_dir), trained_model(tiny_dir, seed=99)
    export_to_peft_dir(source, tmp_path / "peft", settings=LORA)
    pairs = list(zip(trainable_parameters(source), trainable_parameters(target), strict=True))
    assert not any(torch.equal(a, b) for a, b in pairs)
    load_adapter(target, tmp_path / "peft", settings=LORA)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 8, "alpha": 24}, "rank 4"),
        ({"alpha": 6}, "scale 3.0"),
        ({"target_modules": ("linear_qkv",)}, "has the unknown .*mlp.down_proj"),
    ],
)
def test_an_adapter_of_other_settings_is_refused(
    tiny_dir: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    export_to_peft_dir(trained_model(tiny_dir), tmp_path / "peft", settings=LORA)
    other = LoraSettings.model_validate(LORA.model_dump() | changes)
    with pytest.raises(Incompatible, match=message):
        load_adapter(trained_model(tiny_dir, lora=other), tmp_path / "peft", settings=other)


def test_projections_with_an_a_each_are_refused(tiny_dir: Path, tmp_path: Path) -> None:
    model = trained_model(tiny_dir)
    manifest = export(model, tmp_path / "flat")
    a_name = PREFIX + "0.self_attn.k_proj.lora_A.weight"
    own = next(spec for spec in manifest.tensors if spec.name == a_name)
    others = [spec for spec in manifest.tensors if spec.name != a_name]
    last = replace(own, alias_of="", offset_bytes=manifest.total_bytes)
    moved = replace(manifest, tensors=(*others, last))
    content = (tmp_path / "flat").read_bytes() + bytes(4 * 4 * 64)
    write_peft_dir(tmp_path / "peft", moved, memoryview(content))
    with pytest.raises(Incompatible, match=r"layer 0 has a different A .*k_proj"):
        load_adapter(model, tmp_path / "peft", settings=LORA)


def test_a_missing_adapter_is_a_config_error(tiny_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_adapter(trained_model(tiny_dir), tmp_path / "none", settings=LORA)
