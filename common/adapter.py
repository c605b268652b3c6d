"""One adapter version as data: its tensor table, its LoRA configuration and its digest."""

from __future__ import annotations

import enum
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from blake3 import blake3

T = TypeVar("T")


class Dtype(enum.Enum):
    """Element type of a tensor on the wire; the value is its name in a safetensors header."""

    FLOAT32 = "F32"
    BFLOAT16 = "BF16"
    FLOAT16 = "F16"

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return 4 if self is Dtype.FLOAT32 else 2


class Layout(enum.Enum):
    """What a tensor's dimensions mean. A tag, since shapes alone cannot tell where sizes agree.

    Of one module: A is (rank, in_features), B (out_features, rank), DoRA's magnitude
    (out_features,). Of all E experts of a layer: `PACKED`, `FLAT` and `SWAPPED` as `ExpertLayout`
    says; A and B are what the tensors are named, also where `SWAPPED` has them hold the other.
    """

    LORA_A = "lora_A"
    LORA_B = "lora_B"
    MAGNITUDE = "magnitude"
    PACKED_A = "packed_A"
    PACKED_B = "packed_B"
    FLAT_A = "flat_A"
    FLAT_B = "flat_B"
    SWAPPED_A = "swapped_A"
    SWAPPED_B = "swapped_B"
    WEIGHT = "weight"
    """No factor: a weight of the model, of any shape, under its Hugging Face name."""

    @property
    def dimensions(self) -> int | None:
        """Number of them; None for any."""
        if self is Layout.WEIGHT:
            return None
        if self is Layout.MAGNITUDE:
            return 1
        return 3 if self in ExpertLayout.PACKED.factors else 2


class ExpertLayout(enum.Enum):
    """How the factors of a layer's E experts lie in tensors."""

    PER_EXPERT = "per_expert"
    """Each in a tensor of its own; what vLLM takes for models that name each expert's weights."""

    PACKED = "packed"
    """A (E, rank, in), B (E, out, rank)."""

    FLAT = "flat"
    """A (E rank, in), expert after expert; B (out, rank E), all experts of one rank side by side.
    What vLLM takes for models with fused expert weights, and PEFT for `target_parameters`."""

    SWAPPED = "swapped"
    """The tensor named A holds each expert's B transposed, (E rank, out); the one named B each A
    transposed, (in, E rank); both expert after expert. Older `target_parameters`."""

    @property
    def factors(self) -> tuple[Layout, Layout]:
        """The tags of the tensors named A and B."""
        if self is ExpertLayout.PER_EXPERT:
            return Layout.LORA_A, Layout.LORA_B
        return Layout(f"{self.value}_A"), Layout(f"{self.value}_B")


class Kind(enum.Enum):
    """What the tensors of a version are."""

    LORA = "lora"
    """Low-rank factors."""

    MERGED = "merged"
    """The whole model, an adapter summed into it."""

    BASE = "base"
    """The model's own weights, for a replica that has none."""


BASE_NAME = "@base"
"""Stands for an adapter's name where the base itself is sent; no adapter may be called so."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor and where its bytes lie in the flat buffer.

    An alias owns no bytes: it shares `offset_bytes` with the tensor it names.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    layout: Layout
    offset_bytes: int
    digest: bytes
    alias_of: str = ""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The LoRA hyper-parameters inference needs; `target_modules` are PEFT projection names."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: tuple[tuple[str, int], ...] = ()
    """Module names, or patterns as PEFT has them, with ranks other than `rank`; the first match
    counts."""

    alpha_pattern: tuple[tuple[str, float], ...] = ()
    """The same of `alpha`."""

    @property
    def scale(self) -> float:
        """Factor on B A: alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv 2312.03732)."""
        return self._scale(self.rank, self.alpha)

    def rank_of(self, module: str) -> int:
        """Rank of a module by its name in the base model, `model.layers.0.self_attn.q_proj`."""
        return _first_match(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Factor on B A of such a module."""
        return self._scale(
            self.rank_of(module), _first_match(self.alpha_pattern, module, self.alpha)
        )

    def canonical(self) -> list[object]:
        """What a manifest's digest covers of it, as plain values."""
        return [
            *(self.rank, float(self.alpha), sorted(self.target_modules)),
            *(self.use_rslora, self.use_dora),
            *(self.rank_pattern, [(key, float(alpha)) for key, alpha in self.alpha_pattern]),
        ]

    def _scale(self, rank: int, alpha: float) -> float:
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _first_match(pattern: Iterable[tuple[str, T]], module: str, default: T) -> T:
    """PEFT's rule (`get_pattern_key`): a key matches a name's end, from a dot on."""
    return next((v for key, v in pattern if _pattern(key).match(module)), default)


@lru_cache(maxsize=1 << 16)
def _pattern(key: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({key})$")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about an adapter's content but its bytes; equal manifests mean equal bytes.

    `tensors` lie back to back in the flat buffer, in order, largest element first, aliases aside.
    `lora` is there for the kind LORA and for no other.
    """

    base_fingerprint: str
    lora: LoraConfig | None
    tensors: tuple[TensorSpec, ...]
    kind: Kind = Kind.LORA

    @property
    def total_bytes(self) -> int:
        """Size of the flat buffer."""
        return next((t.end_bytes for t in reversed(self.tensors) if not t.alias_of), 0)

    def digest(self) -> bytes:
        """BLAKE3 that names this content: 32 bytes.

        Taken over a canonical JSON of base, configuration and tensor table. The table holds every
        tensor's own BLAKE3, so each byte is hashed once and still is covered.
        """
        content = {
            "base": self.base_fingerprint,
            "lora": self.lora.canonical() if self.lora else self.kind.value,
            "tensors": [
                [t.name, t.dtype.value, t.shape, t.layout.value, t.alias_of, t.digest.hex()]
                for t in self.tensors
            ],
        }
        return blake3(json.dumps(content, separators=(",", ":")).encode()).digest()


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One version of one adapter of one run, and the digest that it has for ever."""

    run_id: str
    adapter: str
    version: int
    digest: bytes

    def __str__(self) -> str:
        return f"{self.adapter}@{self.version} (run {self.run_id}, {self.digest.hex()[:12]})"


@dataclass(frozen=True, slots=True)
class CanarySequence:
    """Token ids, and the log-probability of each but the first given those before it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Canary:
    """What a replica scores before it commits a version.

    `max_difference` bounds the mean absolute difference of the log-probabilities, at temperature 1.
    """

    sequences: tuple[CanarySequence, ...]
    max_difference: float


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor to be laid out: what `plan` needs to know of it."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    layout: Layout
    alias_of: str = ""


def plan(entries: Iterable[TensorEntry]) -> tuple[TensorSpec, ...]:
    """Lay tensors out back to back, four-byte types before two-byte ones, digests still empty.

    A factors come before B factors, which change in another way from step to step: a delta of like
    bytes is smaller. Nothing is padded, so the flat buffer is also the data section of a
    safetensors file, and every tensor is aligned to its element size.
    """
    specs: dict[str, TensorSpec] = {}
    end_bytes = 0
    for entry in sorted(entries, key=_place):
        offset = specs[entry.alias_of].offset_bytes if entry.alias_of else end_bytes
        spec = TensorSpec(
            entry.name, entry.dtype, entry.shape, entry.layout, offset, b"", entry.alias_of
        )
        specs[entry.name] = spec
        end_bytes += 0 if entry.alias_of else spec.size_bytes
    return tuple(specs.values())


def _place(entry: TensorEntry) -> tuple[int, str, bool]:
    return -entry.dtype.itemsize, entry.layout.value, bool(entry.alias_of)


def seal(specs: Iterable[TensorSpec], buffer: memoryview) -> tuple[TensorSpec, ...]:
    """Fill in the tensors' digests from the finished flat buffer; each byte is hashed once."""
    sealed: dict[str, TensorSpec] = {}
    for spec in specs:
        digest = (
            sealed[spec.alias_of].digest
            if spec.alias_of
            else blake3(buffer[spec.offset_bytes : spec.end_bytes]).digest()
        )
        sealed[spec.name] = replace(spec, digest=digest)
    return tuple(sealed.values())
