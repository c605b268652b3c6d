"""The version store and what its subscribers see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.adapter import AdapterRef
from common.wire import crc32c, manifest_from_proto, ref_from_proto
from tests.adapters import make_adapter
from trainer_svc.publisher import Event, PublishedVersion, Publisher, update_events


def _publish(publisher: Publisher, version: int, *, adapter: str = "default") -> AdapterRef:
    manifest, buffer = make_adapter(seed=version)
    return publisher.publish(adapter, manifest, buffer, version=version)


async def _update(events: AsyncIterator[Event]) -> tuple[AdapterRef, bytes]:
    """Read one whole update, checking its order."""
    first = await anext(events)
    ref, manifest = manifest_from_proto(first.manifest)
    received = b""
    while len(received) < manifest.total_bytes:
        chunk = (await anext(events)).chunk
        assert chunk.offset_bytes == len(received)
        assert chunk.crc32c == crc32c(chunk.data)
        received += chunk.data
    assert ref_from_proto((await anext(events)).commit.ref) == ref
    return ref, received


async def test_a_late_subscriber_gets_the_current_version_at_once() -> None:
    publisher = Publisher("run", keep=2)
    _publish(publisher, 1)
    newest = _publish(publisher, 2)

    found, received = await _update(publisher.subscribe(adapters=[], held=[]))

    assert found == newest
    assert received == bytes(make_adapter(seed=2)[1])


async def test_a_slow_subscriber_skips_to_the_newest_version() -> None:
    publisher = Publisher("run", keep=9)
    events = publisher.subscribe(adapters=[], held=[])
    _publish(publisher, 1)
    assert (await _update(events))[0].version == 1
    for version in (2, 3, 4):
        _publish(publisher, version)

    assert (await _update(events))[0].version == 4


async def test_an_update_under_way_is_finished_before_a_newer_one_begins() -> None:
    publisher = Publisher("run", keep=9)
    events = publisher.subscribe(adapters=[], held=[])
    first = _publish(publisher, 1)
    assert (await anext(events)).HasField("manifest")
    second = _publish(publisher, 2)
    rest = [await anext(events) for _ in range(3)]

    assert [event.WhichOneof("event") for event in rest] == ["chunk", "commit", "manifest"]
    assert ref_from_proto(rest[1].commit.ref) == first
    assert ref_from_proto(rest[2].manifest.ref) == second


async def test_a_version_already_held_is_not_sent() -> None:
    publisher = Publisher("run", keep=2, heartbeat_seconds=0.01)
    held = _publish(publisher, 1)

    event = await anext(publisher.subscribe(adapters=[], held=[held]))

    assert event.heartbeat.interval_seconds == 0.01


async def test_versions_over_the_limit_are_retired_at_their_holders() -> None:
    publisher = Publisher("run", keep=2)
    events = publisher.subscribe(adapters=[], held=[])
    first = _publish(publisher, 1)
    await _update(events)
    _publish(publisher, 2)
    await _update(events)
    _publish(publisher, 3)

    assert (await _update(events))[0].version == 3
    assert ref_from_proto((await anext(events)).retire.ref) == first
    assert [ref.version for ref in publisher.refs()] == [2, 3]


async def test_versions_of_a_run_that_is_gone_are_retired() -> None:
    publisher = Publisher("new", keep=2)
    manifest, _ = make_adapter()
    old = AdapterRef("old", "default", 7, manifest.digest())

    event = await anext(publisher.subscribe(adapters=[], held=[old]))

    assert ref_from_proto(event.retire.ref) == old


async def test_only_wanted_adapters_are_sent() -> None:
    publisher = Publisher("run", keep=2, heartbeat_seconds=0.01)
    _publish(publisher, 1, adapter="other")
    _publish(publisher, 1, adapter="mine")
    events = publisher.subscribe(adapters=["mine"], held=[])

    assert (await _update(events))[0].adapter == "mine"
    assert (await anext(events)).HasField("heartbeat")


async def test_close_ends_a_waiting_subscription() -> None:
    publisher = Publisher("run", keep=2)
    waiting = asyncio.ensure_future(anext(publisher.subscribe(adapters=[], held=[]), None))
    await asyncio.sleep(0)
    publisher.close()

    assert await asyncio.wait_for(waiting, timeout=5) is None


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1 << 30])
def test_any_chunk_size_carries_the_same_bytes(chunk_bytes: int) -> None:
    """faults.md 4, verl#7327: an adapter that spans chunks is whole."""
    manifest, buffer = make_adapter()
    ref = AdapterRef("run", "default", 1, manifest.digest())

    events = list(update_events(PublishedVersion(ref, manifest, buffer), chunk_bytes=chunk_bytes))

    assert b"".join(event.chunk.data for event in events[1:-1]) == bytes(buffer)


def test_what_is_published_cannot_be_written_to() -> None:
    manifest, buffer = make_adapter()
    publisher = Publisher("run", keep=1)
    publisher.publish("default", manifest, memoryview(bytearray(buffer)), version=1)

    with pytest.raises(TypeError, match="read-only"):
        publisher._versions["default"][0].buffer[0] = 1
