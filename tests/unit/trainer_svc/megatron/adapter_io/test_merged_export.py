"""The merged model against a plain formula on the directory's weights, on one rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from common.adapter import Kind, Layout, Manifest
from tests import tiny_models
from trainer_svc.megatron.adapter_io.flat import tensors_of
from trainer_svc.megatron.adapter_io.merge import MergedExporter
from trainer_svc.megatron.lora.layers import add_lora, trained_tensors
from trainer_svc.megatron.lora.plan import AdapterPlan, Site, plan_adapter
from trainer_svc.megatron.lora.settings import LoraSettings
from trainer_svc.megatron.model import names
from trainer_svc.megatron.model.build import BaseModel, build_model

pytestmark = pytest.mark.usefixtures("ranks")

RANK = 4


def model(
    model_dir: Path, *, dtype: torch.dtype = torch.bfloat16, **settings: Any
) -> tuple[BaseModel, AdapterPlan]:
    base = build_model(model_dir, dtype=dtype)
    plan = plan_adapter(base.config, LoraSettings.model_validate({"rank": RANK} | settings))
    add_lora(base, plan=plan, seed=5)
    fill(base, seed=1)
    return base, plan


def fill(base: BaseModel, *, seed: int) -> None:
    """Values as training would leave them."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in trained_tensors(base.chunks):
        noise = torch.randn(tensor.parameter.shape, generator=generator)
        if tensor.name.endswith("lora_a"):
            tensor.parameter.data.copy_(noise)
        else:
            tensor.parameter.data.add_(noise, alpha=0.05)


def merged(base: BaseModel, path: Path) -> tuple[Manifest, dict[str, Tensor]]:
    manifest = MergedExporter(base).to_file(path, base_fingerprint="base")
    assert manifest is not None
    return manifest, tensors_of(manifest.tensors, memoryview(bytearray(path.read_bytes())))


def formula(model_dir: Path, base: BaseModel, plan: AdapterPlan) -> dict[str, Tensor]:
    """(W.float() + scale B A).to(W.dtype), or DoRA's of it, on Hugging Face's own tensors."""
    dtype = base.chunks[0].config.params_dtype
    weights = {
        name: weight if name.endswith("e_score_correction_bias") else weight.to(dtype)
        for name, weight in load_file(model_dir / "model.safetensors").items()
    }
    values = {t.name: t.parameter.detach().float() for t in trained_tensors(base.chunks)}
    changed: dict[str, Tensor] = {}
    for site, number, pair in plan.pairs():
        a, b = (values[f"{site.name}.{number}.{leaf}"] for leaf in ("lora_a", "lora_b"))
        magnitude = values.get(f"{site.name}.{number}.magnitude")
        is_fused = len(pair.projections) > 1
        for part, projection in enumerate(pair.projections):
            lora_b, rows = [
                whole
                if whole is None or not is_fused
                else names.split(site.linear.fusion, whole, heads=base.config.heads)[part]
                for whole in (b, magnitude)
            ]
            assert lora_b is not None
            for name in weight_names(base, site, projection.name):
                total = weights[name].float() + pair.scale * (lora_b @ a)
                if rows is not None:
                    total *= (rows / total.norm(dim=1)).unsqueeze(1)
                changed[name] = total.to(dtype)
    return weights | changed


def weight_names(base: BaseModel, site: Site, projection: str) -> Iterator[str]:
    """Of one linear, or of every expert that shares the adapter."""
    assert base.config.moe is not None or not site.linear.is_expert
    experts = range(base.config.moe.num_experts) if base.config.moe else range(1)
    shared = site.linear.is_expert and site.expert is None
    for expert in experts if shared else [site.expert]:
        yield f"model.layers.{site.layer}.{projection.format(expert=expert)}.weight"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("llama_tied", {"use_rslora": True}),
        ("qwen2", {"type": "canonical_lora", "target_modules": ["linear_k", "linear_fc1_up"]}),
        ("qwen3_moe", {"target_modules": ["router", "linear_qkv", "linear_fc1", "linear_fc2"]}),
        ("qwen3_moe", {"experts": "shared"}),
        ("mixtral", {}),
        ("deepseek_v3", {}),
    ],
)
def test_every_weight_is_the_rounded_sum(
    name: str, settings: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    model_dir = tiny_models.save(name, tmp_path / name)
    base, plan = model(model_dir, dtype=dtype, **settings)
    manifest, tensors = merged(base, tmp_path / "merged")
    expected = formula(model_dir, base, plan)
    assert (manifest.kind, manifest.lora) == (Kind.MERGED, None)
    assert {spec.layout for spec in manifest.tensors} == {Layout.WEIGHT}
    assert not any(spec.alias_of for spec in manifest.tensors)
    # The same tensors as in the directory: a tied output layer is not sent.
    assert tensors.keys() == expected.keys()
    for key, tensor in tensors.items():
        assert (tensor.dtype, tensor.shape) == (expected[key].dtype, expected[key].shape)
        assert torch.equal(tensor, expected[key]), key


def test_dora_is_merged_by_its_own_formula(tmp_path: Path) -> None:
    model_dir = tiny_models.save("llama", tmp_path / "llama")
    base, plan = model(model_dir, dtype=torch.float32, type="dora")
    _, tensors = merged(base, tmp_path / "merged")
    for key, expected in formula(model_dir, base, plan).items():
        torch.testing.assert_close(tensors[key], expected, atol=1e-6, rtol=1e-5)


def test_a_thousand_merges_leave_what_one_leaves(tmp_path: Path) -> None:
    """faults.md 16, TRL#6688, and 15, miles#1087: from the pristine base each time, bit for bit,
    and the base's digest never changes."""
    model_dir = tiny_models.save("llama", tmp_path / "llama", num_layers=1)
    base, plan = model(model_dir)
    before = digest(base)
    exporter = MergedExporter(base)
    for step in range(1000):
        fill(base, seed=step)
        manifest = exporter.to_file(tmp_path / "cycled", base_fingerprint="base")
    assert digest(base) == before
    fresh, _ = model(model_dir)
    for cycled, own in zip(
        trained_tensors(base.chunks), trained_tensors(fresh.chunks), strict=True
    ):
        own.parameter.data.copy_(cycled.parameter)
    once, tensors = merged(fresh, tmp_path / "once")
    assert manifest == once
    assert (tmp_path / "cycled").read_bytes() == (tmp_path / "once").read_bytes()
    for key, expected in formula(model_dir, fresh, plan).items():
        assert torch.equal(tensors[key], expected), key


def digest(base: BaseModel) -> str:
    """Of everything but the adapters."""
    found = sha256()
    for chunk in base.chunks:
        for name, parameter in chunk.named_parameters():
            if ".adapters." not in name:
                found.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def test_memory_stays_at_one_tensor_above_the_model(tmp_path: Path) -> None:
    """A model of 24 layers: what the export allocates is far less than a tenth of it."""
    model_dir = tiny_models.save(
        "llama", tmp_path / "wide", num_layers=24, hidden_size=256, intermediate_size=768
    )
    base, _ = model(model_dir)
    exporter = MergedExporter(base)
    exporter.to_file(tmp_path / "first", base_fingerprint="base")
    with peak_growth_bytes() as growth:
        manifest = exporter.to_file(tmp_path / "second", base_fingerprint="base")
    assert manifest is not None
    largest = max(spec.size_bytes for spec in manifest.tensors)
    # Gate and up are one sum in float32: four times the larger Hugging Face tensor.
    assert growth[0] < 12 * largest < manifest.total_bytes / 6


@contextmanager
def peak_growth_bytes() -> Iterator[list[int]]:
    """By how much this process's own memory grew at most inside the block; mapped files aside."""
    growth, ended, before = [0], threading.Event(), own_memory_bytes()

    def watch() -> None:
        while not ended.wait(0.001):
            growth[0] = max(growth[0], own_memory_bytes() - before)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield growth
    finally:
        ended.set()
        watching.join()


def own_memory_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
