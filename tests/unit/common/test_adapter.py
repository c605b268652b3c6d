"""The adapter format: layout, digests, aliases."""

from __future__ import annotations

from dataclasses import replace

import pytest
from blake3 import blake3

from common.adapter import Dtype, Layout, LoraConfig, Manifest, TensorEntry, plan, seal
from tests.adapters import LORA, make_adapter


def test_plan_lays_tensors_back_to_back_widest_first() -> None:
    entries = [
        TensorEntry("half", Dtype.FLOAT16, (3, 1), Layout.LORA_A),
        TensorEntry("full", Dtype.FLOAT32, (2, 3), Layout.LORA_A),
        TensorEntry("twin", Dtype.FLOAT32, (2, 3), Layout.LORA_A, alias_of="full"),
        TensorEntry("brain", Dtype.BFLOAT16, (1, 5), Layout.LORA_B),
    ]

    specs = plan(entries)

    assert [(s.name, s.offset_bytes, s.size_bytes) for s in specs] == [
        ("full", 0, 24),
        ("twin", 0, 24),
        ("half", 24, 6),
        ("brain", 30, 10),
    ]
    assert Manifest("base", LORA, specs).total_bytes == 40


def test_seal_hashes_each_tensor_and_gives_an_alias_its_source_digest() -> None:
    entries = [
        TensorEntry("a", Dtype.FLOAT32, (1, 1), Layout.LORA_A),
        TensorEntry("b", Dtype.FLOAT32, (1, 1), Layout.LORA_B),
        TensorEntry("c", Dtype.FLOAT32, (1, 1), Layout.LORA_A, alias_of="a"),
    ]

    sealed = {s.name: s.digest for s in seal(plan(entries), memoryview(b"\0\0\0\0\1\1\1\1"))}

    assert sealed == {
        "a": blake3(b"\0\0\0\0").digest(),
        "b": blake3(b"\1\1\1\1").digest(),
        "c": blake3(b"\0\0\0\0").digest(),
    }


@pytest.mark.parametrize(
    "lora",
    [
        replace(LORA, alpha=LORA.alpha + 1),
        replace(LORA, rank=LORA.rank + 1),
        replace(LORA, use_rslora=True),
        replace(LORA, target_modules=("k_proj",)),
        replace(LORA, use_dora=True),
        replace(LORA, rank_pattern=(("q_proj", 1),)),
        replace(LORA, alpha_pattern=(("q_proj", 1.0),)),
    ],
)
def test_digest_covers_the_lora_configuration(lora: LoraConfig) -> None:
    """faults.md 14, verl#5325: another alpha is another adapter."""
    manifest, _ = make_adapter()

    assert replace(manifest, lora=lora).digest() != manifest.digest()


def test_digest_covers_base_and_bytes_and_nothing_else() -> None:
    manifest, _ = make_adapter(seed=1)
    same, _ = make_adapter(seed=1)
    other, _ = make_adapter(seed=2)

    assert manifest.digest() == same.digest()
    assert manifest.digest() != other.digest()
    assert manifest.digest() != replace(manifest, base_fingerprint="another").digest()


def test_scale_follows_peft() -> None:
    assert LoraConfig(16, 32.0, ("q_proj",)).scale == 2.0
    assert LoraConfig(16, 32.0, ("q_proj",), use_rslora=True).scale == 8.0
