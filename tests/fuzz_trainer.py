"""A trainer that sends sound streams of every kind, and tables that lie under a right digest."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from refit.v1 import adapter_pb2

from common.adapter import (
    AdapterRef,
    Canary,
    CanarySequence,
    Dtype,
    Layout,
    Manifest,
    TensorEntry,
    TensorSpec,
    plan,
    seal,
)
from common.stream.content import Content
from common.stream.sender import Receiver
from common.wire import ref_to_proto
from tests.adapters import LORA
from tests.fake_trainer import sent_events, update_events
from tests.fuzz_mutations import Event, Stream
from tests.receiving import prepare_deltas

_CANARY = Canary((CanarySequence((1, 2, 3), (-0.5, -0.5)),), max_difference=0.1)


class FuzzTrainer:
    """Publishes a version after the other, each near the one before, and sends sound streams."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._versions = itertools.count(1)
        dtype = [Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16]
        self._specs = {kind: plan(_entries(kind)) for kind in dtype}
        self._bytes = {kind: rng.randbytes(_size(specs)) for kind, specs in self._specs.items()}
        self.published: dict[AdapterRef, Content] = {}

    def publish(self) -> Content:
        """Some words of the B factors change; some versions bring a canary."""
        dtype = self._rng.choice(list(Dtype))
        data = bytearray(self._bytes[dtype])
        for _ in range(self._rng.randrange(1, 8)):
            at = self._rng.randrange(len(data) // 2, len(data))
            data[at] = (data[at] + 1) % 256
        self._bytes[dtype] = bytes(data)
        view = memoryview(self._bytes[dtype])
        manifest = Manifest("base", LORA, seal(self._specs[dtype], view))
        ref = AdapterRef("run", dtype.value, next(self._versions), manifest.digest())
        canary = _CANARY if not self._rng.randrange(4) else None
        content = self.published[ref] = Content.whole(ref, manifest, view, canary=canary)
        while len(self.published) > 64:
            del self.published[next(iter(self.published))]
        return content

    async def sound_stream(self, held: list[AdapterRef], half: tuple[AdapterRef, int]) -> Stream:
        """An update in any encoding, the rest of one, an alias or a retirement."""
        match self._rng.randrange(8):
            case 0 if held:
                ref = self._rng.choice(held)
                other = replace(ref, adapter="alias", version=next(self._versions))
                return [Event(alias=adapter_pb2.AdapterAlias(ref=ref_to_proto(other)))]
            case 1 if held:
                ref = self._rng.choice(held)
                return [Event(retire=adapter_pb2.AdapterRetire(ref=ref_to_proto(ref)))]
            case 2:
                known = [self.published[ref] for ref in held if ref in self.published]
                return _lie(self._rng.choice([self.publish(), *known]), self._rng)
            case 3 | 4 if half[0] in self.published:
                content, start_bytes = self.published[half[0]], half[1]
            case 5 if self.published:
                content, start_bytes = self._rng.choice(list(self.published.values())), 0
            case _:
                content, start_bytes = self.publish(), 0
        known = [self.published[ref] for ref in held if ref in self.published]
        base = self._rng.choice([*known, None])
        if base is not None:
            prepare_deltas(content, base=base)
        receiver = Receiver(
            held=known if self._rng.randrange(2) else (), base=base, start_bytes=start_bytes
        )
        return await sent_events(content, receiver, chunk_bytes=self._rng.choice((64, 256, 4096)))


def _entries(dtype: Dtype) -> list[TensorEntry]:
    prefix = "base_model.model.model.layers.0.self_attn"
    a = [f"{prefix}.{module}.lora_A.weight" for module in LORA.target_modules]
    b = [f"{prefix}.{module}.lora_B.weight" for module in LORA.target_modules]
    return [
        TensorEntry(a[0], dtype, (2, 64), Layout.LORA_A),
        TensorEntry(a[1], dtype, (2, 64), Layout.LORA_A, alias_of=a[0]),
        TensorEntry(b[0], dtype, (32, 2), Layout.LORA_B),
        TensorEntry(b[1], dtype, (48, 2), Layout.LORA_B),
    ]


def _size(specs: tuple[TensorSpec, ...]) -> int:
    return Manifest("base", LORA, specs).total_bytes


def _lie(content: Content, rng: random.Random) -> Stream:
    """Another table under a digest that is right for it: only the bytes can tell."""
    specs = list(content.manifest.tensors)
    at = rng.randrange(len(specs))
    spec, other = specs[at], rng.choice(specs)
    changes: dict[str, object] = rng.choice(
        [
            {
                "shape": rng.choice(
                    [(2, 1 << 38), (1 << 40, 2), (2, 8), (4, 32), (2, 1 << 59), (64, 2)]
                )
            },
            {"digest": other.digest},
            {"dtype": rng.choice(list(Dtype))},
            {"name": rng.choice([other.name + "x", "m.lora_A.weight", "../" + spec.name])},
            {"layout": rng.choice(list(Layout))},
            {"alias_of": rng.choice([other.name, "", spec.name])},
            {"offset_bytes": rng.choice([0, 4, -4, other.offset_bytes, 1 << 40])},
        ]
    )
    specs[at] = replace(spec, **changes)  # type: ignore[arg-type]
    manifest = Manifest("base", LORA, tuple(specs))
    ref = replace(content.ref, digest=manifest.digest())
    events = list(update_events(ref, manifest, content.buffer, chunk_bytes=128))
    if rng.randrange(2):
        held = adapter_pb2.AdapterChunk(
            encoding=adapter_pb2.ENCODING_HELD, decoded_bytes=manifest.total_bytes
        )
        events[1:-1] = [Event(chunk=held)]
    return events
