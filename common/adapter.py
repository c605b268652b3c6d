"""One adapter version as data: its tensor table, its LoRA configuration and its digest."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from blake3 import blake3


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
    """What a LoRA tensor's dimensions mean: A is (rank, in_features), B is (out_features, rank)."""

    LORA_A = "lora_A"
    LORA_B = "lora_B"


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

    @property
    def scale(self) -> float:
        """Factor on B A: alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv 2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about an adapter's content but its bytes; equal manifests mean equal bytes.

    `tensors` lie back to back in the flat buffer, in order, largest element first, aliases aside.
    """

    base_fingerprint: str
    lora: LoraConfig
    tensors: tuple[TensorSpec, ...]

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
            "lora": [
                self.lora.rank,
                float(self.lora.alpha),
                sorted(self.lora.target_modules),
                self.lora.use_rslora,
            ],
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
