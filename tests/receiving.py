"""Updates on the receiving side, opened and fed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from refit.v1 import adapter_pb2
from safetensors.numpy import load_file

from common.adapter import AdapterRef, seal
from common.stream import codec
from common.stream.content import Content, Delta
from common.stream.frames import Event
from common.stream.pieces import plan_pieces
from common.wire import ManifestReader, ref_to_proto
from rollout_svc.updates.limits import Limits
from rollout_svc.updates.receiver import Update
from rollout_svc.versions.registry import AdapterRegistry
from tests.adapters import make_adapter, make_ref
from tests.fake_trainer import update_events

MANIFEST, BUFFER = make_adapter()
REF = make_ref(MANIFEST)
WHOLE = Content.whole(REF, MANIFEST, BUFFER)


class Opener:
    """Opens an update from the manifest at the head of `events`."""

    def __init__(self, path: Path, limits: Limits) -> None:
        self.path, self._limits = path, limits

    def __call__(self, events: list[Event], *, held: Sequence[Content] = ()) -> Update:
        return Update(
            reader_of(events),
            path=self.path,
            limits=self._limits,
            held=held,
            merge=False,
            keep_deltas=True,
        )


def reader_of(events: list[Event]) -> ManifestReader:
    reader = ManifestReader(events[0].manifest)
    for event in events:
        if event.HasField("tensors"):
            reader.add(event.tensors)
    return reader


def chunks(events: list[Event]) -> list[adapter_pb2.AdapterChunk]:
    return [event.chunk for event in events if event.HasField("chunk")]


def events_of(content: Content, *, chunk_bytes: int = 50) -> list[Event]:
    return list(
        update_events(content.ref, content.manifest, content.buffer, chunk_bytes=chunk_bytes)
    )


def next_version(*, like: Content, version: int = 2, step: int = 1) -> Content:
    """The same A factors, the lowest byte of every word of the B factors one `step` on."""
    data = bytearray(like.buffer)
    for at in range(64, len(data), 4):
        data[at] = (data[at] + step) % 256
    buffer = memoryview(bytes(data))
    manifest = replace(like.manifest, tensors=seal(like.manifest.tensors, buffer))
    return Content.whole(make_ref(manifest, version=version), manifest, buffer)


async def check_whole(update: Update, content: Content) -> None:
    staged = await update.finish(adapter_pb2.AdapterCommit(ref=ref_to_proto(content.ref)))
    assert staged.content.ref == content.ref
    assert bytes(staged.content.buffer) == bytes(content.buffer)
    tensors = load_file(staged.path / "adapter_model.safetensors")
    assert set(tensors) == {spec.name for spec in content.manifest.tensors}
    for spec in content.manifest.tensors:
        expected = bytes(content.buffer[spec.offset_bytes : spec.end_bytes])
        assert tensors[spec.name].tobytes() == expected


def prepare_deltas(new: Content, *, base: Content) -> None:
    """Have `new` sent as differences to `base`, though they may be no smaller than the bytes."""
    for piece in plan_pieces(new.manifest, held=(), base=base.manifest):
        if piece.itemsize:
            shift = piece.base_begin - piece.begin
            data = codec.encode(
                new.buffer[piece.begin : piece.end],
                base.buffer[piece.begin + shift : piece.end + shift],
                itemsize=piece.itemsize,
            )
            new.deltas[base.ref.digest, piece.begin] = Delta(piece.end, data)


def held_chunk(begin: int, end: int) -> adapter_pb2.AdapterChunk:
    return adapter_pb2.AdapterChunk(
        offset_bytes=begin, decoded_bytes=end - begin, encoding=adapter_pb2.ENCODING_HELD
    )


@dataclass(slots=True)
class Reports:
    """What the trainer was told, and what was listed at that moment."""

    registry: AdapterRegistry
    sent: list[adapter_pb2.ReportAdapterRequest] = field(default_factory=list)
    listed: list[list[AdapterRef]] = field(default_factory=list)

    async def __call__(self, request: adapter_pb2.ReportAdapterRequest) -> None:
        self.sent.append(request)
        self.listed.append(self.registry.listing())
