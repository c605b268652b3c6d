"""Adapters of real models' shapes, filled with random bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from common.adapter import Dtype, Layout, LoraConfig, Manifest, TensorEntry, plan, seal

BASE_FINGERPRINT = "bench"
PROJECTIONS = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class Shape:
    """`modules` are (name, in_features, out_features) of every adapted projection, in bf16."""

    name: str
    rank: int
    modules: tuple[tuple[str, int, int], ...]

    def empty(self) -> Manifest:
        """The manifest without digests."""
        names = tuple(sorted({name.rpartition(".")[2] for name, _, _ in self.modules}))
        lora = LoraConfig(rank=self.rank, alpha=2.0 * self.rank, target_modules=names)
        return Manifest(BASE_FINGERPRINT, lora, plan(self.entries()))

    def filled(self, *, seed: int) -> tuple[Manifest, memoryview]:
        """A version of it; other seeds give other bytes everywhere."""
        empty = self.empty()
        words = np.random.default_rng(seed).integers(
            0, 1 << 63, size=-(-empty.total_bytes // 8), dtype=np.uint64
        )
        buffer = memoryview(words.tobytes())[: empty.total_bytes]
        return Manifest(empty.base_fingerprint, empty.lora, seal(empty.tensors, buffer)), buffer

    def entries(self) -> Iterator[TensorEntry]:
        """Its tensors."""
        for name, inputs, outputs in self.modules:
            prefix = f"base_model.model.{name}"
            a, b = (self.rank, inputs), (outputs, self.rank)
            yield TensorEntry(f"{prefix}.lora_A.weight", Dtype.BFLOAT16, a, Layout.LORA_A)
            yield TensorEntry(f"{prefix}.lora_B.weight", Dtype.BFLOAT16, b, Layout.LORA_B)


def dense(layers: int, hidden: int, kv: int, intermediate: int) -> tuple[tuple[str, int, int], ...]:
    """The linears of a dense model, for `Shape.modules`."""
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, intermediate),
        "mlp.up_proj": (hidden, intermediate),
        "mlp.down_proj": (intermediate, hidden),
    }
    return tuple(
        (f"model.layers.{layer}.{name}", *size)
        for layer in range(layers)
        for name, size in sizes.items()
    )


def _experts(
    layers: int, experts: int, hidden: int, width: int
) -> tuple[tuple[str, int, int], ...]:
    sizes = {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)}
    return tuple(
        (f"model.layers.{layer}.mlp.experts.{expert}.{name}", *size)
        for layer in range(layers)
        for expert in range(experts)
        for name, size in sizes.items()
    )


SMALL = Shape("10 MB, 60 tensors", 32, dense(30, 2560, 640, 6912)[: 30 * 7 : 7])
"""One projection in each of 30 layers."""

SMOLLM2 = Shape("SmolLM2-135M rank 16", 16, dense(30, 576, 192, 1536))
QWEN3_8B = Shape("Qwen3-8B rank 32", 32, dense(36, 4096, 1024, 12288))
MIXTURE = Shape("mixture of experts", 16, _experts(30, 100, 2048, 1536))
