"""One update as the events of a stream: manifest, the pieces the receiver lacks, commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace

from refit.v1 import adapter_pb2

from common.stream.content import Content, Delta
from common.stream.encoder import DeltaEncoder
from common.stream.frames import Chunk, Event, Message
from common.stream.pieces import Piece, plan_pieces
from common.wire import CHUNK_BYTES, crc32c, ref_to_proto

_ENCODED_AHEAD = 2
"""Deltas in work while one is being sent, so that codec and link do not wait for each other."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """What a sender knows of the other side.

    `start_bytes` of the flat buffer are there already. Tensors of `held` versions are not sent, and
    others as a difference to `base`, one that it holds too. Without an `encoder` only deltas made
    elsewhere are passed on.
    """

    held: Sequence[Content] = ()
    base: Content | None = None
    start_bytes: int = 0
    encoder: DeltaEncoder | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """Size of a chunk before encoding, a multiple of 4, and how long either side may be silent.

    A receiver renews its lease, and takes each message within `stall_seconds`.
    """

    chunk_bytes: int = CHUNK_BYTES
    heartbeat_seconds: float = 5.0
    lease_seconds: float = 15.0
    stall_seconds: float = 300.0

    def heartbeat(self) -> Event:
        beat = adapter_pb2.Heartbeat(
            interval_seconds=self.heartbeat_seconds, lease_seconds=self.lease_seconds
        )
        return Event(heartbeat=beat)


async def update_events(
    content: Content, receiver: Receiver, *, pace: Pace
) -> AsyncGenerator[Message]:
    """A whole update; bytes that are still arriving here are passed on as they come.

    Raises:
        Unavailable: they will not come any more.
    """
    base = receiver.base
    for event in _manifest(content, base):
        yield event
    digests = {spec.digest for held in receiver.held for spec in held.manifest.tensors}
    pieces = plan_pieces(content.manifest, held=digests, base=base.manifest if base else None)
    # A slow receiver must not keep versions alive whose digests were all that was needed.
    receiver = replace(receiver, held=())
    position = receiver.start_bytes
    for piece in pieces:
        while position < piece.end:
            if not (piece.held or await _is_here(content, position, pace)):
                yield pace.heartbeat()
                continue
            chunk, position = await _chunk(content, piece, position, receiver, pace)
            yield chunk
    while not await content.was_finished(timeout_seconds=pace.heartbeat_seconds):
        yield pace.heartbeat()
    yield Event(commit=adapter_pb2.AdapterCommit(ref=ref_to_proto(content.ref)))


def _manifest(content: Content, base: Content | None) -> Iterator[Event]:
    for message in content.messages():
        if isinstance(message, adapter_pb2.ManifestTensors):
            yield Event(tensors=message)
            continue
        event = Event(manifest=message)
        if base:
            event.manifest.delta_base.CopyFrom(ref_to_proto(base.ref))
        yield event


async def _is_here(content: Content, position: int, pace: Pace) -> bool:
    if content.arrived_bytes > position:
        return True
    return await content.arrived_beyond(position, timeout_seconds=pace.heartbeat_seconds)


async def _chunk(
    content: Content, piece: Piece, begin: int, receiver: Receiver, pace: Pace
) -> tuple[Chunk, int]:
    """The chunk that begins at byte `begin`, and where the next one does."""
    if piece.held:
        size = piece.end - begin
        return Chunk(begin, b"", crc32c(b""), adapter_pb2.ENCODING_HELD, size), piece.end
    delta = await _delta(content, piece, begin, receiver, pace)
    if delta is not None:
        encoding, size = adapter_pb2.ENCODING_DELTA_ZSTD, delta.end - begin
        return Chunk(begin, delta.data, crc32c(delta.data), encoding, size), delta.end
    end = min(_chunk_end(piece, begin, pace), content.arrived_bytes)
    data = content.buffer[begin:end]
    return Chunk(begin, data, crc32c(data)), end


def _chunk_end(piece: Piece, begin: int, pace: Pace) -> int:
    """On a word of the delta, wherever an update is gone on with."""
    odd = (begin - piece.begin) % (piece.itemsize or 1)
    return min(begin - odd + pace.chunk_bytes, piece.end)


async def _delta(
    content: Content, piece: Piece, begin: int, receiver: Receiver, pace: Pace
) -> Delta | None:
    """The delta from `begin` on; None where raw bytes have to do."""
    base, encoder = receiver.base, receiver.encoder
    if base is None or not piece.itemsize or (begin - piece.begin) % piece.itemsize:
        return None
    if encoder is None:
        return content.deltas.get((base.ref.digest, begin))
    ahead = range(begin, piece.end, pace.chunk_bytes)[: 1 + _ENCODED_AHEAD]
    futures = [
        encoder.start(content, base, piece, begin=at, end=_chunk_end(piece, at, pace))
        for at in ahead
    ]
    # Shielded, for others may wait for the same delta.
    data = await asyncio.shield(futures[0])
    return Delta(_chunk_end(piece, begin, pace), data) if data else None
