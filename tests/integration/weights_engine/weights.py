"""Whole weights as contents, and staged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from common.adapter import (
    BASE_NAME,
    AdapterRef,
    Kind,
    Layout,
    LoraConfig,
    Manifest,
    TensorEntry,
    plan,
    seal,
)
from common.model_dir import base_model
from common.peft_dir import PeftWriter
from common.stream.content import Content
from tests.integration.rollout_engine.tiny import (
    AdapterMaker,
)
from trainer_svc.base_weights import read_base


class MergedMaker:
    """Stages merged versions of random adapters."""

    def __init__(self, adapters: AdapterMaker, model_dir: Path, parent: Path) -> None:
        self._adapters, self._model_dir, self._parent = adapters, model_dir, parent

    def __call__(self, seed: int) -> tuple[Content, Path, Path]:
        """The content, where it is staged, and the PEFT directory that it is merged from."""
        adapter, peft_dir = self._adapters.make(seed=seed)
        content = merged_content(self._model_dir, adapter, peft_dir)
        return content, staged(content, self._parent / f"merged-{seed}"), peft_dir


def staged(content: Content, path: Path) -> Path:
    writer = PeftWriter(path, content.manifest)
    writer.write(0, content.buffer)
    return writer.finish()


def base_content(model_dir: Path) -> Content:
    read = read_base(model_dir, base_fingerprint=base_model(model_dir).fingerprint)
    ref = AdapterRef("run", BASE_NAME, 1, read.manifest.digest())
    return Content.whole(ref, read.manifest, read.buffer)


def merged_content(model_dir: Path, adapter: Content, path: Path) -> Content:
    """The whole model with a PEFT directory's adapter in it, by the formula."""
    weights = load_file(model_dir / "model.safetensors")
    factors = load_file(path / "adapter_model.safetensors")
    assert isinstance(adapter.manifest.lora, LoraConfig)
    for name in [name for name in factors if ".lora_A." in name]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = factors[name].float(), factors[name.replace(".lora_A.", ".lora_B.")].float()
        weight = weights[f"{module}.weight"]
        weights[f"{module}.weight"] = weight + adapter.manifest.lora.scale * (b @ a)
    return weights_content(weights, adapter)


def weights_content(weights: dict[str, Tensor], like: Content) -> Content:
    dtype = like.manifest.tensors[0].dtype
    specs = plan(
        TensorEntry(name, dtype, tuple(weight.shape), Layout.WEIGHT)
        for name, weight in weights.items()
    )
    buffer = memoryview(b"".join(weights[spec.name].numpy().tobytes() for spec in specs))
    fingerprint = like.manifest.base_fingerprint
    manifest = Manifest(fingerprint, None, seal(specs, buffer), Kind.MERGED)
    return Content.whole(replace(like.ref, digest=manifest.digest()), manifest, buffer)
