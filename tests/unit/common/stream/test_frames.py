"""Chunks written and read by hand are the contract's own."""

from __future__ import annotations

import random

import pytest
from google.protobuf.message import DecodeError
from refit.v1 import adapter_pb2

from common.errors import CorruptUpdate
from common.stream.frames import Chunk, Event, parse, serialize

BIGGEST = (1 << 63) - 1
CHUNKS = [
    Chunk(0, b"", 0),
    Chunk(0, b"x", 0xFFFFFFFF),
    Chunk(127, b"y" * 127, 1, adapter_pb2.ENCODING_DELTA_ZSTD, 128),
    Chunk(128, memoryview(b"abcd" * 64)[3:200], 7, adapter_pb2.ENCODING_HELD, 1 << 40),
    Chunk(BIGGEST, bytes(1 << 20), 0x80000000, adapter_pb2.ENCODING_RAW, BIGGEST),
]


def _event(chunk: Chunk) -> Event:
    return Event(
        chunk=adapter_pb2.AdapterChunk(
            offset_bytes=chunk.offset_bytes,
            data=bytes(chunk.data),
            crc32c=chunk.crc32c,
            encoding=chunk.encoding,  # type: ignore[arg-type]
            decoded_bytes=chunk.decoded_bytes,
        )
    )


@pytest.mark.parametrize("chunk", CHUNKS)
def test_protobuf_reads_what_is_written_by_hand(chunk: Chunk) -> None:
    assert Event.FromString(serialize(chunk)) == _event(chunk)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_what_protobuf_writes_is_read_without_a_copy(chunk: Chunk) -> None:
    raw = _event(chunk).SerializeToString()

    found = parse(raw)

    assert found == chunk
    assert isinstance(found, Chunk)
    assert not found.data or memoryview(found.data).obj is raw


def test_every_other_event_goes_through_protobuf() -> None:
    beat = Event(heartbeat=adapter_pb2.Heartbeat(interval_seconds=5, lease_seconds=15))

    assert parse(serialize(beat)) == beat
    assert parse(b"") == Event()


@pytest.mark.parametrize(
    "raw",
    [
        # An unknown field after the chunk, an unknown field in it, a negative offset, two chunks.
        serialize(CHUNKS[1]) + b"\x78\x01",
        b"\x12\x05\x12\x01x\x78\x01",
        Event(chunk=adapter_pb2.AdapterChunk(offset_bytes=-1, data=b"x")).SerializeToString(),
        serialize(CHUNKS[1]) + serialize(CHUNKS[2]),
    ],
)
def test_an_unusual_chunk_is_read_by_protobuf(raw: bytes) -> None:
    assert parse(raw) == Event.FromString(raw)


def test_mutated_messages_are_read_as_protobuf_reads_them_or_refused() -> None:
    rng = random.Random(0)
    seeds = [serialize(chunk) for chunk in CHUNKS[1:4]]
    for _ in range(20_000):
        raw = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        damaged = bytes(raw[: rng.randint(0, len(raw))])
        try:
            expected = Event.FromString(damaged)
        except DecodeError:
            with pytest.raises(CorruptUpdate):
                parse(damaged)
            continue
        found = parse(damaged)
        if isinstance(found, Chunk):
            chunk = expected.chunk
            assert (found.data, found.offset_bytes) == (chunk.data, chunk.offset_bytes)
            assert (found.crc32c, found.decoded_bytes) == (chunk.crc32c, chunk.decoded_bytes)
            assert found.encoding & 0xFFFFFFFF == chunk.encoding & 0xFFFFFFFF
        else:
            assert found == expected
