"""What becomes of an update whose stream breaks in the middle."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from pathlib import Path

import pytest
from refit.v1 import adapter_pb2

from common.adapter import AdapterRef
from common.stream.content import Content
from common.stream.frames import Event
from common.stream.sender import Receiver
from common.wire import ref_to_proto
from rollout_svc.engine import BoundReport, EngineAdapter
from rollout_svc.updates import applier as updates
from rollout_svc.updates.applier import UpdateApplier
from rollout_svc.versions.registry import AdapterRegistry
from tests.adapters import make_adapter, make_ref
from tests.eventually import eventually
from tests.fake_engine import FakeEngine
from tests.fake_trainer import sent_events, update_events
from tests.open_files import open_files


def content(version: int) -> Content:
    manifest, buffer = make_adapter(seed=version)
    return Content.whole(make_ref(manifest, version=version), manifest, buffer)


def events_of(version: int) -> list[Event]:
    whole = content(version)
    return list(update_events(whole.ref, whole.manifest, whole.buffer, chunk_bytes=50))


async def broken(applier: UpdateApplier, version: int, *, events: int) -> AdapterRef:
    """The stream of `version` ends after so many events."""
    for event in events_of(version)[:events]:
        await applier.apply(event)
    applier.suspend()
    return content(version).ref


async def test_what_came_is_kept_and_the_rest_makes_it_whole(
    applier: UpdateApplier, registry: AdapterRegistry, staging: Path
) -> None:
    ref = await broken(applier, 1, events=3)
    assert registry.listing() == []
    assert len(list(staging.iterdir())) == 1
    assert applier.partial() == adapter_pb2.PartialUpdate(ref=ref_to_proto(ref), received_bytes=100)
    rest = await sent_events(content(1), Receiver(start_bytes=100))
    assert [len(event.chunk.data) for event in rest if event.HasField("chunk")] == [60]
    for event in rest:
        await applier.apply(event)
    assert registry.listing() == [ref]
    [live] = registry.contents()
    assert bytes(live.buffer) == bytes(content(1).buffer)


async def test_a_break_while_room_is_made_leaves_nothing(
    applier: UpdateApplier, staging: Path
) -> None:
    opening = asyncio.ensure_future(applier.apply(events_of(1)[0]))
    await asyncio.sleep(0)  # the thread is at work
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    applier.suspend()
    assert applier.partial() is None
    assert list(staging.iterdir()) == []


async def test_a_break_within_the_table_leaves_nothing(
    applier: UpdateApplier, staging: Path
) -> None:
    whole = content(1)
    pages = list(update_events(whole.ref, whole.manifest, whole.buffer, page_tensors=1))
    await applier.apply(pages[0])
    await applier.apply(pages[1])
    applier.suspend()
    assert applier.partial() is None
    assert list(staging.iterdir()) == []
    for event in events_of(1):
        await applier.apply(event)


async def test_another_update_takes_its_place(
    applier: UpdateApplier, registry: AdapterRegistry, staging: Path
) -> None:
    await broken(applier, 1, events=3)
    ref = await broken(applier, 2, events=2)
    assert len(list(staging.iterdir())) == 1
    partial = applier.partial()
    assert partial is not None
    assert (partial.ref, partial.received_bytes) == (ref_to_proto(ref), 50)


async def test_it_goes_when_its_rest_does_not_come(
    applier: UpdateApplier, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that is gone for good must not take up memory for ever."""
    await broken(applier, 1, events=3)
    assert updates._KEEP_HALF_SECONDS == 600
    monkeypatch.setattr(updates, "_KEEP_HALF_SECONDS", 0.0)
    assert applier.partial() is None
    assert list(staging.iterdir()) == []


async def test_it_goes_with_the_replica(applier: UpdateApplier, staging: Path) -> None:
    await broken(applier, 1, events=3)
    applier.close()
    assert list(staging.iterdir()) == []
    applier.close()


class SlowEngine(FakeEngine):
    """A load waits for the gate."""

    async def load(self, adapter: EngineAdapter, *, in_place: bool = False) -> list[BoundReport]:
        await self.gate.wait()
        return await super().load(adapter, in_place=in_place)


@pytest.fixture
def engine() -> FakeEngine:
    return SlowEngine()


async def test_a_stream_that_breaks_during_the_commit_changes_nothing(
    applier: UpdateApplier, registry: AdapterRegistry, engine: FakeEngine, staging: Path
) -> None:
    """faults.md 22 and 23: neither a slot nor a directory is lost, and the next update succeeds."""
    engine.gate.clear()
    *events, commit = events_of(1)
    for event in events:
        await applier.apply(event)
    committing = asyncio.ensure_future(applier.apply(commit))
    await eventually(lambda: applier._update is None)
    committing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await committing
    applier.suspend()
    assert (registry.listing(), engine.loaded) == ([], {})
    assert list(staging.iterdir()) == []
    engine.gate.set()
    for event in events_of(2):
        await applier.apply(event)
    assert registry.listing() == [content(2).ref]


async def test_hundreds_of_versions_level_off(
    applier: UpdateApplier, registry: AdapterRegistry, engine: FakeEngine, staging: Path
) -> None:
    """faults.md 27, AReaL#1385: directories, slots, files, memory; every third one broke once."""
    figures, earlier = [], Counter(open_files())
    for version in range(1, 301):
        if version % 3 == 0:
            await broken(applier, version, events=3)
            partial = applier.partial()
            assert partial is not None
            receiver = Receiver(start_bytes=partial.received_bytes)
            events = await sent_events(content(version), receiver)
        else:
            events = events_of(version)
        for event in events:
            await applier.apply(event)
        await eventually(lambda: len(registry.versions.all) <= 2)
        if version in (100, 300):
            figures.append((*_figures(staging, earlier), len(engine.loaded)))
    assert figures[0] == figures[1]
    directories, mappings, _, _, slots = figures[0]
    assert (directories, mappings, slots) == (2, 2, 2)


def _figures(staging: Path, earlier: Counter[str]) -> tuple[int, ...]:
    """Directories, mappings, open files, and the most memory that there was, in 16 MiB.

    Args:
        earlier: files that other tests left open, and that may close meanwhile.
    """
    return (
        len(list(staging.iterdir())),
        Path("/proc/self/maps").read_text().count(str(staging)),
        (Counter(open_files()) - earlier).total(),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 16_384,
    )


async def test_later_updates_do_not_touch_the_bytes_that_are_served(
    applier: UpdateApplier, registry: AdapterRegistry, engine: FakeEngine
) -> None:
    """faults.md 21, verl#6688: what is committed outlives updates that break."""
    for event in events_of(1):
        await applier.apply(event)
    [live] = registry.contents()
    file = engine.loaded[1].path / "adapter_model.safetensors"
    before = file.read_bytes()
    await broken(applier, 2, events=4)
    await broken(applier, 3, events=2)
    applier.close()
    assert file.read_bytes() == before
    assert bytes(live.buffer) == bytes(content(1).buffer)
