"""Adapters of many tensors or many bytes, and what a subscriber makes of an update of them."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from refit.v1 import adapter_pb2

from common.adapter import (
    AdapterRef,
    Dtype,
    Layout,
    LoraConfig,
    Manifest,
    TensorEntry,
    TensorSpec,
    plan,
    seal,
)
from common.stream import codec
from common.stream.content import Content
from common.stream.frames import Message
from common.wire import ManifestReader, crc32c, ref_from_proto
from tests.messages import as_event

LORA = LoraConfig(rank=8, alpha=16.0, target_modules=("q_proj",))


def make_large(
    *, tensors: int = 4, width: int = 512, dtype: Dtype = Dtype.BFLOAT16, seed: int = 0
) -> tuple[Manifest, memoryview]:
    """So many tensors of (8, width) and (width, 8) in turn, random bytes."""
    specs = plan(
        TensorEntry(
            f"base_model.model.model.layers.{index // 2}.self_attn.q_proj.lora_{side}.weight",
            dtype,
            (8, width) if side == "A" else (width, 8),
            Layout.LORA_A if side == "A" else Layout.LORA_B,
        )
        for index in range(tensors)
        for side in ["AB"[index % 2]]
    )
    buffer = random.Random(seed).randbytes(tensors * 8 * width * dtype.itemsize)
    return _sealed(specs, buffer)


def stepped(
    manifest: Manifest, buffer: memoryview, *, unchanged: Sequence[int] = ()
) -> tuple[Manifest, memoryview]:
    """The next step of training: the lowest byte of each word one more, but of some tensors."""
    changed = bytearray(buffer)
    for index, spec in enumerate(manifest.tensors):
        if index not in unchanged:
            words = slice(spec.offset_bytes, spec.end_bytes, spec.dtype.itemsize)
            changed[words] = bytes((low + 1) % 256 for low in changed[words])
    return _sealed(manifest.tensors, bytes(changed))


def _sealed(specs: Sequence[TensorSpec], buffer: bytes) -> tuple[Manifest, memoryview]:
    view = memoryview(buffer)
    return Manifest("base", LORA, seal(specs, view)), view


def make_content(made: tuple[Manifest, memoryview], *, version: int = 1) -> Content:
    return Content.whole(AdapterRef("run", "default", version, made[0].digest()), *made)


@dataclass(slots=True)
class Received:
    """One update as it came."""

    ref: AdapterRef
    manifest: Manifest
    delta_base: AdapterRef | None
    buffer: bytearray
    chunks: list[adapter_pb2.AdapterChunk] = field(default_factory=list)

    def encodings(self) -> list[tuple[str, int]]:
        """Encoding and length in the flat buffer of every chunk."""
        names = adapter_pb2.Encoding.Name
        return [
            (names(c.encoding or adapter_pb2.ENCODING_RAW)[9:], c.decoded_bytes or len(c.data))
            for c in self.chunks
        ]


async def receive(
    events: AsyncGenerator[Message], *, held: Sequence[Content] = (), first: bytes = b""
) -> Received:
    """Read one whole update, every byte of it checked; `first` bytes are here already."""
    reader = ManifestReader(as_event(await anext(events)).manifest)
    while not reader.complete:
        reader.add(as_event(await anext(events)).tensors)
    update = Received(reader.ref, reader.manifest(), reader.delta_base, bytearray(first))
    while (event := as_event(await anext(events))).HasField("chunk"):
        chunk = event.chunk
        assert chunk.offset_bytes == len(update.buffer)
        assert chunk.crc32c == crc32c(chunk.data)
        update.buffer += _decoded(chunk, update, held)
        update.chunks.append(chunk)
    assert ref_from_proto(event.commit.ref) == update.ref
    assert len(update.buffer) == update.manifest.total_bytes
    return update


def _decoded(
    chunk: adapter_pb2.AdapterChunk, update: Received, held: Sequence[Content]
) -> bytes | bytearray:
    if chunk.encoding == adapter_pb2.ENCODING_RAW or not chunk.encoding:
        return chunk.data
    begin, end = chunk.offset_bytes, chunk.offset_bytes + chunk.decoded_bytes
    out, itemsize = bytearray(), 0
    for spec in update.manifest.tensors:
        if spec.offset_bytes < end and begin < spec.end_bytes and not spec.alias_of:
            source, counterpart = _source(chunk, spec, update, held)
            shift = counterpart.offset_bytes - spec.offset_bytes
            first, last = max(begin, spec.offset_bytes), min(end, spec.end_bytes)
            out += source.buffer[first + shift : last + shift]
            itemsize = spec.dtype.itemsize
    if chunk.encoding == adapter_pb2.ENCODING_HELD:
        assert not chunk.data
        return out
    decoded = bytearray(len(out))
    codec.decode(chunk.data, memoryview(out), memoryview(decoded), itemsize=itemsize)
    return decoded


def _source(
    chunk: adapter_pb2.AdapterChunk, spec: TensorSpec, update: Received, held: Sequence[Content]
) -> tuple[Content, TensorSpec]:
    """Where a held tensor, or the counterpart of one, lies."""
    by_digest = chunk.encoding == adapter_pb2.ENCODING_HELD
    return next(
        (content, other)
        for content in held
        if by_digest or content.ref == update.delta_base
        for other in content.manifest.tensors
        if (other.digest == spec.digest if by_digest else other.name == spec.name)
    )
