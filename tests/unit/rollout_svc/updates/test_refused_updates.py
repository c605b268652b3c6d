"""Updates that are refused: why, in which stage, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from refit.v1 import adapter_pb2

from common.adapter import Canary, CanarySequence
from common.errors import CorruptUpdate, Unavailable
from common.stream.content import Content
from common.stream.frames import Event
from common.stream.sender import Receiver
from common.wire import crc32c, ref_to_proto
from rollout_svc.engine import BoundReport, EngineAdapter, Mismatch, MismatchReason
from rollout_svc.updates.applier import UpdateApplier
from rollout_svc.versions.registry import AdapterRegistry
from tests.adapters import make_adapter, make_ref
from tests.applying import REFUSED, apply_all, retire, update
from tests.fake_engine import FakeEngine
from tests.fake_trainer import sent_events, update_events
from tests.receiving import Reports

UNBOUND = [BoundReport(0, 1, (Mismatch("a.lora_A.weight", MismatchReason.NO_MODULE),), "")]


def without_a_chunk(events: list[Event]) -> None:
    del events[2]


def with_chunks_swapped(events: list[Event]) -> None:
    events[2], events[3] = events[3], events[2]


def with_a_chunk_twice(events: list[Event]) -> None:
    events.insert(3, events[2])


def without_the_last_chunk(events: list[Event]) -> None:
    del events[-2]


def with_a_damaged_chunk(events: list[Event]) -> None:
    events[2].chunk.data = bytes(len(events[2].chunk.data))


def with_bytes_past_the_end(events: list[Event]) -> None:
    chunk = events[-2].chunk
    chunk.data += b"more"
    chunk.crc32c = crc32c(chunk.data)


def with_another_commit(events: list[Event]) -> None:
    events[-1].commit.ref.version = 7


@pytest.mark.parametrize(
    ("spoil", "reason", "received_bytes"),
    [
        (without_a_chunk, "chunk.offset_bytes: 100 of default@2", 50),
        (with_chunks_swapped, "chunk.offset_bytes: 100 of default@2", 50),
        (with_a_chunk_twice, "chunk.offset_bytes: 50 of default@2", 100),
        (without_the_last_chunk, "commit: 150 of 160 bytes", 150),
        (with_a_damaged_chunk, "chunk.crc32c", 50),
        (with_bytes_past_the_end, "chunk.data: ends at 164", 150),
        (with_another_commit, "commit.ref: not that of the open update", 160),
    ],
)
async def test_damage_on_the_wire_is_reported_and_the_rest_asked_for_again(
    applier: UpdateApplier,
    registry: AdapterRegistry,
    reports: Reports,
    staging: Path,
    spoil: Callable[[list[Event]], None],
    reason: str,
    received_bytes: int,
) -> None:
    """faults.md 4, 22 and 26: a hole or damage changes nothing; what came is not sent again."""
    good, events = update(1)
    await apply_all(applier, events)
    second, events = update(2, seed=1)
    spoil(events)
    with pytest.raises(CorruptUpdate):
        await apply_all(applier, events)
    assert registry.listing() == [good]
    report = reports.sent[-1]
    assert (report.outcome, report.stage) == (REFUSED, adapter_pb2.UPDATE_STAGE_WIRE)
    assert reason in report.reason
    assert list(report.held) == [ref_to_proto(good)]

    applier.suspend()
    assert applier.partial() == adapter_pb2.PartialUpdate(
        ref=ref_to_proto(second), received_bytes=received_bytes
    )
    content = next_content(2, seed=1)
    rest = await sent_events(content, Receiver(start_bytes=received_bytes), chunk_bytes=50)
    await apply_all(applier, rest)
    assert registry.listing() == [good, second]
    assert applier.partial() is None
    assert len(list(staging.iterdir())) == 2


def next_content(version: int, *, seed: int) -> Content:
    manifest, buffer = make_adapter(seed=seed)
    return Content.whole(make_ref(manifest, version=version), manifest, buffer)


async def test_bytes_that_are_not_what_was_published_are_given_up(
    applier: UpdateApplier, registry: AdapterRegistry, reports: Reports, staging: Path
) -> None:
    """They came as they were sent: asking again gives the same. The next version is taken."""
    good, events = update(1)
    await apply_all(applier, events)
    _, events = update(2, seed=1)
    chunk = events[2].chunk
    chunk.data = bytes(len(chunk.data))
    chunk.crc32c = crc32c(chunk.data)
    await apply_all(applier, events)
    assert registry.listing() == [good]
    report = reports.sent[-1]
    assert (report.outcome, report.stage) == (REFUSED, adapter_pb2.UPDATE_STAGE_STAGE)
    assert "BLAKE3" in report.reason
    assert len(reports.sent) == 2
    assert len(list(staging.iterdir())) == 1
    applier.suspend()
    assert applier.partial() is None
    third, events = update(3, seed=2)
    await apply_all(applier, events)
    assert registry.listing() == [good, third]


async def test_what_does_not_fit_is_refused_before_any_byte(
    applier: UpdateApplier, registry: AdapterRegistry, reports: Reports, staging: Path
) -> None:
    applier.limits = replace(applier.limits, max_bytes=10)
    ref, events = update()
    await applier.apply(events[0])
    [report] = reports.sent
    assert (report.outcome, report.stage) == (REFUSED, adapter_pb2.UPDATE_STAGE_MANIFEST)
    assert report.ref == ref_to_proto(ref)
    assert "raise max_update_bytes" in report.reason
    assert list(staging.iterdir()) == []
    await apply_all(applier, events[1:])
    assert len(reports.sent) == 1
    assert registry.listing() == []


async def test_a_table_without_end_is_refused(
    applier: UpdateApplier, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of megabytes, page after page, take no more memory than a table may."""
    manifest, buffer = make_adapter()
    events = list(update_events(make_ref(manifest), manifest, buffer, page_tensors=1))
    two_pages = events[0].manifest.ByteSize() + events[1].tensors.ByteSize()
    monkeypatch.setattr("rollout_svc.updates.applier._MAX_TABLE_BYTES", two_pages)
    await apply_all(applier, events[:2])
    assert reports.sent == []
    await apply_all(applier, events[2:])
    [report] = reports.sent
    assert report.stage == adapter_pb2.UPDATE_STAGE_MANIFEST
    assert report.reason == f"manifest.tensors: a table above {two_pages} bytes; use PEFT's names"


async def test_a_load_that_fails_is_refused_by_stage_and_frees_its_slot(
    applier: UpdateApplier,
    registry: AdapterRegistry,
    engine: FakeEngine,
    reports: Reports,
    staging: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = FakeEngine.load

    async def load(
        self: FakeEngine, adapter: EngineAdapter, *, in_place: bool = False
    ) -> list[BoundReport]:
        await real(self, adapter)
        raise Unavailable("engine: Call to refit_load method failed; retry later")

    good, events = update(1)
    await apply_all(applier, events)
    with monkeypatch.context() as patched:
        patched.setattr(FakeEngine, "load", load)
        await apply_all(applier, update(2, seed=1)[1])
    report = reports.sent[-1]
    assert (report.outcome, report.stage) == (REFUSED, adapter_pb2.UPDATE_STAGE_LOAD)
    assert report.reason == "engine: Call to refit_load method failed; retry later"
    assert (sorted(engine.loaded), registry.listing()) == ([1], [good])
    assert len(list(staging.iterdir())) == 1


async def test_what_the_engine_does_not_bind_is_refused_by_stage(
    applier: UpdateApplier,
    registry: AdapterRegistry,
    engine: FakeEngine,
    reports: Reports,
    staging: Path,
) -> None:
    """faults.md 26, dynamo#8630: whatever the order, a refusal never empties the replica."""
    old, events = update(1)
    await apply_all(applier, events)
    await applier.apply(retire(old))
    engine.answers = UNBOUND
    _, events = update(2, seed=1)
    await apply_all(applier, events)
    report = reports.sent[-1]
    assert (report.outcome, report.stage) == (REFUSED, adapter_pb2.UPDATE_STAGE_LOAD)
    assert registry.listing() == [old]
    assert len(list(staging.iterdir())) == 1


async def test_the_canary_is_scored_before_the_commit(
    applier: UpdateApplier, registry: AdapterRegistry, engine: FakeEngine, reports: Reports
) -> None:
    canary = Canary((CanarySequence((1, 2), (-0.75,)),), max_difference=0.25)
    first, events = update(1, canary=canary)
    await apply_all(applier, events)
    assert reports.sent[-1].canary_difference == 0.25
    engine.score_logprob = 0.0
    _, events = update(2, seed=1, canary=canary)
    await apply_all(applier, events)
    report = reports.sent[-1]
    assert (report.outcome, report.stage) == (REFUSED, adapter_pb2.UPDATE_STAGE_CANARY)
    assert registry.listing() == [first]
    assert sorted(engine.loaded) == [1]
