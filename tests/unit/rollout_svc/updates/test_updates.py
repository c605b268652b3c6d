"""From the events of a subscription to a committed or refused version."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from refit.v1 import adapter_pb2, version_pb2

from common.adapter import AdapterRef
from common.errors import CorruptUpdate, NotHeld, RefitError
from common.stream.frames import Event
from common.stream.sender import Receiver
from common.wire import ref_to_proto
from rollout_svc.updates.applier import UpdateApplier
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.versions.selector import Rule, Selector
from tests.adapters import make_adapter, make_ref
from tests.applying import REFUSED, apply_all, retire, update
from tests.fake_engine import FakeEngine
from tests.fake_trainer import sent_events, update_events
from tests.live import admit
from tests.receiving import WHOLE, Reports, next_version

COMMITTED = adapter_pb2.OUTCOME_COMMITTED


def alias(ref: AdapterRef) -> Event:
    return Event(alias=adapter_pb2.AdapterAlias(ref=ref_to_proto(ref)))


async def test_the_report_follows_the_commit(
    applier: UpdateApplier, reports: Reports, registry: AdapterRegistry
) -> None:
    """faults.md 5, ART#661: when the trainer hears of a version, `AT_LEAST` it is served by it."""
    ref, events = update(chunk_bytes=1024)
    selector = Selector(Rule.AT_LEAST, "default", 1)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(served(registry, selector))
        await apply_all(applier, events)
    assert waiting.result() == ref
    [report] = reports.sent
    assert report.outcome == COMMITTED
    assert (report.ref, list(report.bound_modules)) == (ref_to_proto(ref), [2])
    assert list(report.held) == [ref_to_proto(ref)]
    assert report.wire_bytes == events[0].manifest.ByteSize() + 160 + 32
    assert not report.HasField("canary_difference")
    assert 0 < report.timings.wire_seconds < 1
    assert 0 < report.timings.stage_seconds < 1
    assert 0 < report.timings.commit_seconds < 1
    assert reports.listed == [[ref]]


async def served(registry: AdapterRegistry, selector: Selector) -> AdapterRef:
    async with admit(registry, selector, wait_seconds=5) as live:
        assert live is not None
        return live.ref


async def test_nothing_is_seen_before_the_commit(
    applier: UpdateApplier, registry: AdapterRegistry, engine: FakeEngine
) -> None:
    """faults.md 25, prime-rl#2391: neither listed nor loaded while it is half-written."""
    ref, events = update()
    for event in events[:-1]:
        await applier.apply(event)
        assert (registry.listing(), engine.loaded) == ([], {})
    await applier.apply(events[-1])
    assert registry.listing() == [ref]


async def test_a_table_in_pages_is_one_manifest(
    applier: UpdateApplier, registry: AdapterRegistry, reports: Reports
) -> None:
    manifest, buffer = make_adapter()
    ref = make_ref(manifest)
    events = list(update_events(ref, manifest, buffer, page_tensors=1))
    assert [event.WhichOneof("event") for event in events] == [
        *("manifest", "tensors", "tensors", "tensors", "chunk", "commit")
    ]
    await apply_all(applier, events)
    assert registry.listing() == [ref]
    assert reports.sent[0].wire_bytes == (
        events[0].manifest.ByteSize() + sum(e.tensors.ByteSize() for e in events[1:4]) + 160 + 32
    )


async def test_an_alias_is_reported_like_an_update_that_took_no_bytes(
    applier: UpdateApplier, registry: AdapterRegistry, engine: FakeEngine, reports: Reports
) -> None:
    ref, events = update(1)
    old = AdapterRef("run", "old", 1, ref.digest)
    await apply_all(applier, [*events, alias(old)])
    assert registry.listing() == [ref, old]
    assert sorted(engine.loaded) == [1]
    report = reports.sent[-1]
    assert (report.ref, report.outcome, report.wire_bytes) == (ref_to_proto(old), COMMITTED, 0)
    assert list(report.held) == [ref_to_proto(ref), ref_to_proto(old)]


async def test_an_alias_of_what_is_gone_ends_the_stream_without_a_report(
    applier: UpdateApplier, reports: Reports
) -> None:
    with pytest.raises(NotHeld):
        await applier.apply(alias(AdapterRef("run", "old", 1, b"x" * 32)))
    assert reports.sent == []


async def test_a_refused_alias_does_not_disturb_the_update_that_is_arriving(
    applier: UpdateApplier, registry: AdapterRegistry, reports: Reports
) -> None:
    """With a relay, aliases come on the trainer's stream while bytes come on the parent's."""
    first, events = update(1)
    await apply_all(applier, events)
    wrong = alias(replace(first, digest=b"x" * 32))
    manifest, buffer = make_adapter(seed=1)
    second = make_ref(manifest, version=2)
    events = list(update_events(second, manifest, buffer, page_tensors=1))
    for event in events:
        await applier.apply(event)
        await applier.apply(wrong)
    assert registry.listing() == [first, second]
    refusals = [report for report in reports.sent if report.outcome == REFUSED]
    assert len(refusals) == len(events)
    assert {report.stage for report in refusals} == {adapter_pb2.UPDATE_STAGE_LOAD}


async def test_a_refused_alias_does_not_end_the_skipping_of_a_refused_update(
    applier: UpdateApplier, registry: AdapterRegistry
) -> None:
    first, events = update(1)
    await apply_all(applier, events)
    applier.limits = replace(applier.limits, max_bytes=10)
    _, events = update(2, seed=1)
    await applier.apply(events[0])
    await applier.apply(alias(replace(first, digest=b"x" * 32)))
    await apply_all(applier, events[1:])
    assert registry.listing() == [first]


async def test_a_retired_version_is_not_listed(
    applier: UpdateApplier, registry: AdapterRegistry
) -> None:
    old, events = update(1)
    await apply_all(applier, events)
    new, events = update(2, seed=1)
    await apply_all(applier, events)
    await applier.apply(retire(old))
    assert registry.listing() == [new]
    assert applier.metrics.registry.get_sample_value("refit_rollout_adapters_live") == 1.0


@pytest.mark.parametrize("kept", [slice(1, None), slice(2, None)])
async def test_events_out_of_order_end_the_stream(applier: UpdateApplier, kept: slice) -> None:
    _, events = update()
    with pytest.raises(CorruptUpdate, match="came without a manifest"):
        await apply_all(applier, events[kept])


async def test_a_manifest_within_an_update_ends_the_stream(applier: UpdateApplier) -> None:
    _, events = update()
    with pytest.raises(CorruptUpdate, match="came while another was open"):
        await apply_all(applier, [*events[:2], events[0]])


@pytest.mark.parametrize("ref", [version_pb2.AdapterRef(), version_pb2.AdapterRef(run_id="r")])
async def test_names_that_are_malformed_end_the_stream(
    applier: UpdateApplier, ref: version_pb2.AdapterRef
) -> None:
    for event in (
        Event(retire=adapter_pb2.AdapterRetire(ref=ref)),
        Event(alias=adapter_pb2.AdapterAlias(ref=ref)),
    ):
        with pytest.raises(RefitError, match="run_id and adapter are both needed"):
            await applier.apply(event)


async def test_a_delta_to_what_is_gone_ends_the_stream_without_a_report(
    applier: UpdateApplier, reports: Reports, staging: Path
) -> None:
    """Nobody's fault: subscribing again tells the trainer what is here."""
    events = await sent_events(next_version(like=WHOLE), Receiver(base=WHOLE))
    with pytest.raises(NotHeld):
        await applier.apply(events[0])
    assert reports.sent == []
    assert list(staging.iterdir()) == []
