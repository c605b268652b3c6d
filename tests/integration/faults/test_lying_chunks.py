"""A trainer whose chunks are not those that its manifest promised."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from refit.v1 import adapter_pb2

from common.stream.frames import Event
from common.wire import crc32c, ref_from_proto
from tests.eventually import eventually
from tests.fake_trainer import raw_chunk, update_events
from tests.integration.faults.liar import CHUNK_BYTES, LiedTo
from tests.integration.faults.processes import SECONDS
from tests.integration.faults.run import called

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]
Lie = Callable[[list[Event]], None]


def dropped(events: list[Event]) -> None:
    del events[4]


def repeated(events: list[Event]) -> None:
    events.insert(4, events[4])


def reordered(events: list[Event]) -> None:
    events[4], events[5] = events[5], events[4]


def beyond_the_buffer(events: list[Event]) -> None:
    events.insert(9, raw_chunk(8 * CHUNK_BYTES, b"more"))


def too_long(events: list[Event]) -> None:
    events[8] = raw_chunk(7 * CHUNK_BYTES, events[8].chunk.data + b"more")


def far_beyond(events: list[Event]) -> None:
    events[1].chunk.offset_bytes = 1 << 62


def before_the_buffer(events: list[Event]) -> None:
    events[1].chunk.offset_bytes = -CHUNK_BYTES


def empty(events: list[Event]) -> None:
    events.insert(4, raw_chunk(3 * CHUNK_BYTES, b""))


def damaged(events: list[Event]) -> None:
    events[4].chunk.crc32c ^= 1


def longer_than_its_bytes(events: list[Event]) -> None:
    events[4].chunk.decoded_bytes = CHUNK_BYTES + 4


def in_an_unknown_encoding(events: list[Event]) -> None:
    # Its number and wire type, then 99.
    events[4].chunk.MergeFromString(bytes((4 << 3, 99)))


def a_difference_to_nothing(events: list[Event]) -> None:
    events[4].chunk.encoding = adapter_pb2.ENCODING_DELTA_ZSTD


def without_its_end(events: list[Event]) -> None:
    del events[8]


def committed_as_another(events: list[Event]) -> None:
    events[9].commit.ref.version += 1


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (dropped, "chunk.offset_bytes: 32768"),
        (repeated, "chunk.offset_bytes: 24576"),
        (reordered, "chunk.offset_bytes: 32768"),
        (beyond_the_buffer, "chunk.data: ends at 65540"),
        (too_long, "chunk.data: ends at 65540"),
        (far_beyond, f"chunk.offset_bytes: {1 << 62}"),
        (before_the_buffer, "chunk.offset_bytes: -8192"),
        (empty, "a chunk is not empty"),
        (damaged, "chunk.crc32c: differs"),
        (longer_than_its_bytes, "chunk.decoded_bytes: 8196"),
        (in_an_unknown_encoding, "chunk.encoding: 99"),
        (a_difference_to_nothing, "have no counterpart in its base"),
        (without_its_end, "commit: 57344 of 65536 bytes"),
        (committed_as_another, "commit.ref"),
    ],
)
async def test_a_wrong_chunk_is_refused_and_asked_for_again(
    lie: Lie, reason: str, pair: LiedTo
) -> None:
    """faults.md 4 and 26, verl#7327, dynamo#8630."""
    ref, events = pair.next_update()
    lie(events)
    streams = pair.liar.streams
    async with called(pair.replica, pair.refs):
        pair.send(events)
        report = await pair.heard()
        assert report.outcome == adapter_pb2.OUTCOME_REFUSED
        assert report.stage == adapter_pb2.UPDATE_STAGE_WIRE
        assert reason in report.reason
        assert ref_from_proto(report.ref) == ref
        assert await pair.replica.listing() == pair.refs[-2:]
        await eventually(lambda: pair.liar.streams > streams, seconds=SECONDS)
        await pair.commit_next()


async def test_bytes_that_are_not_those_of_the_digest_are_refused(pair: LiedTo) -> None:
    """faults.md 3, verl#7014: other bytes than were published, every checksum right."""
    ref, manifest, buffer = pair.next_version()
    other = bytearray(buffer)
    other[-1] ^= 1
    async with called(pair.replica, pair.refs):
        pair.send(list(update_events(ref, manifest, memoryview(other), chunk_bytes=CHUNK_BYTES)))
        report = await pair.heard()
        assert report.stage == adapter_pb2.UPDATE_STAGE_STAGE
        assert manifest.tensors[-1].name in report.reason and "BLAKE3" in report.reason
        assert await pair.replica.listing() == pair.refs[-2:]
        await pair.commit_next()


async def test_bytes_taken_for_held_that_are_not_are_asked_for_again(pair: LiedTo) -> None:
    """faults.md 25, prime-rl#2395: the trainer's picture of the replica was wrong."""
    _, events = pair.next_update()
    events[1].chunk.encoding, events[1].chunk.data = adapter_pb2.ENCODING_HELD, b""
    events[1].chunk.decoded_bytes, events[1].chunk.crc32c = CHUNK_BYTES, crc32c(b"")
    streams = pair.liar.streams
    async with called(pair.replica, pair.refs):
        pair.send(events)
        await eventually(lambda: pair.liar.streams > streams, seconds=SECONDS)
        assert pair.liar.reports.empty()
        await pair.commit_next()
