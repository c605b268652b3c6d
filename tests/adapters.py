"""Small adapters made on the spot."""

from __future__ import annotations

import random

from common.adapter import (
    AdapterRef,
    Dtype,
    Layout,
    LoraConfig,
    Manifest,
    TensorEntry,
    plan,
    seal,
)

LORA = LoraConfig(rank=2, alpha=4.0, target_modules=("k_proj", "q_proj"))
_PREFIX = "base_model.model.model.layers.0.self_attn"


def make_adapter(
    *, seed: int = 0, base: str = "base", dtype: Dtype = Dtype.FLOAT32
) -> tuple[Manifest, memoryview]:
    """A rank-2 adapter of q and k with random bytes; k's A is q's."""
    q_a = f"{_PREFIX}.q_proj.lora_A.weight"
    entries = [
        TensorEntry(q_a, dtype, (2, 8), Layout.LORA_A),
        TensorEntry(f"{_PREFIX}.k_proj.lora_A.weight", dtype, (2, 8), Layout.LORA_A, alias_of=q_a),
        TensorEntry(f"{_PREFIX}.q_proj.lora_B.weight", dtype, (8, 2), Layout.LORA_B),
        TensorEntry(f"{_PREFIX}.k_proj.lora_B.weight", dtype, (4, 2), Layout.LORA_B),
    ]
    specs = plan(entries)
    size = Manifest(base, LORA, specs).total_bytes
    buffer = memoryview(random.Random(seed).randbytes(size))
    return Manifest(base, LORA, seal(specs, buffer)), buffer


def make_ref(manifest: Manifest, *, version: int = 1) -> AdapterRef:
    return AdapterRef("run", "default", version, manifest.digest())
