"""Small whole models as updates: no factors, but weights."""

from __future__ import annotations

import random
from pathlib import Path

from common.adapter import (
    BASE_NAME,
    AdapterRef,
    Dtype,
    Kind,
    Layout,
    Manifest,
    TensorEntry,
    plan,
    seal,
)
from common.peft_dir import PeftWriter
from common.stream.content import Content

NAMES = ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.gate.bias")
SHAPES = ((32, 16), (16,), (2, 3, 4))


def make_weights(
    *, kind: Kind = Kind.MERGED, version: int = 1, base: str = "base", adapter: str = "default"
) -> Content:
    """Three tensors of two types with random bytes, which the version seeds."""
    dtypes = (Dtype.BFLOAT16, Dtype.FLOAT32, Dtype.BFLOAT16)
    entries = [
        TensorEntry(name, dtype, shape, Layout.WEIGHT)
        for name, dtype, shape in zip(NAMES, dtypes, SHAPES, strict=True)
    ]
    specs = plan(entries)
    size = Manifest(base, None, specs, kind).total_bytes
    buffer = memoryview(random.Random(version).randbytes(size))
    manifest = Manifest(base, None, seal(specs, buffer), kind)
    name = BASE_NAME if kind is Kind.BASE else adapter
    return Content.whole(AdapterRef("run", name, version, manifest.digest()), manifest, buffer)


def stage(content: Content, path: Path) -> Path:
    """The directory as a replica stages it."""
    writer = PeftWriter(path, content.manifest)
    writer.write(0, content.buffer)
    return writer.finish()
