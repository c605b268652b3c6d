"""From the events of a subscription to a committed or refused version."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from refit.v1 import adapter_pb2
from safetensors.numpy import load_file

from common.adapter import AdapterRef, Dtype
from common.errors import CorruptUpdate
from common.wire import crc32c, ref_to_proto
from rollout_svc.adapters import AdapterRegistry
from rollout_svc.engine import BoundReport
from rollout_svc.metrics import Metrics
from rollout_svc.receiver import Limits
from rollout_svc.updates import UpdateApplier
from tests.adapters import make_adapter, make_ref
from tests.fake_engine import FakeEngine
from tests.fake_trainer import Event, update_events


@dataclass(slots=True)
class Reports:
    """What the trainer was told, and what was listed at that moment."""

    registry: AdapterRegistry
    sent: list[adapter_pb2.ReportAdapterRequest] = field(default_factory=list)
    listed: list[list[AdapterRef]] = field(default_factory=list)

    async def __call__(self, request: adapter_pb2.ReportAdapterRequest) -> None:
        self.sent.append(request)
        self.listed.append(self.registry.listing())


@pytest.fixture
def reports(registry: AdapterRegistry) -> Reports:
    return Reports(registry)


@pytest.fixture
def applier(
    registry: AdapterRegistry, limits: Limits, staging: Path, reports: Reports
) -> UpdateApplier:
    return UpdateApplier(
        registry=registry, limits=limits, staging=staging, metrics=Metrics(), report=reports
    )


def update(
    version: int = 1, *, chunk_bytes: int = 1 << 20, seed: int = 0
) -> tuple[AdapterRef, list[Event]]:
    manifest, buffer = make_adapter(seed=seed)
    ref = make_ref(manifest, version=version)
    return ref, list(update_events(ref, manifest, buffer, chunk_bytes=chunk_bytes))


async def apply_all(applier: UpdateApplier, events: list[Event]) -> None:
    for event in events:
        await applier.apply(event)


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1024, 1 << 30])
async def test_any_chunk_size_gives_the_same_adapter(
    applier: UpdateApplier, registry: AdapterRegistry, engine: FakeEngine, chunk_bytes: int
) -> None:
    """Fault 4: the staged tensors do not depend on where the stream was cut."""
    manifest, buffer = make_adapter()
    ref, events = update(chunk_bytes=chunk_bytes)
    await apply_all(applier, events)
    assert registry.listing() == [ref]
    tensors = load_file(engine.loaded[1].path / "adapter_model.safetensors")
    for spec in manifest.tensors:
        expected = bytes(buffer[spec.offset_bytes : spec.end_bytes])
        assert tensors[spec.name].tobytes() == expected


async def test_the_report_follows_the_commit(applier: UpdateApplier, reports: Reports) -> None:
    """Fault 5: when the trainer hears of a version, a request for it is served."""
    ref, events = update()
    await apply_all(applier, events)
    [report] = reports.sent
    assert report.outcome == adapter_pb2.OUTCOME_COMMITTED
    assert (report.ref, list(report.bound_modules)) == (ref_to_proto(ref), [2])
    assert 0 < report.timings.wire_seconds < 1
    assert 0 < report.timings.stage_seconds < 1
    assert 0 < report.timings.commit_seconds < 1
    assert reports.listed == [[ref]]


def without_a_chunk(events: list[Event]) -> list[Event]:
    return [*events[:2], *events[3:]]


def without_the_last_chunk(events: list[Event]) -> list[Event]:
    return [*events[:-2], events[-1]]


def with_a_damaged_chunk(events: list[Event]) -> list[Event]:
    events[2].chunk.data = bytes(len(events[2].chunk.data))
    return events


def with_wrong_bytes(events: list[Event]) -> list[Event]:
    """Bytes whose checksum on the way is right, but not the manifest's digest."""
    chunk = events[2].chunk
    chunk.data = bytes(len(chunk.data))
    chunk.crc32c = crc32c(chunk.data)
    return events


def with_bytes_past_the_end(events: list[Event]) -> list[Event]:
    chunk = events[-2].chunk
    chunk.data += b"more"
    chunk.crc32c = crc32c(chunk.data)
    return events


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (without_a_chunk, "chunk.offset_bytes: 100"),
        (without_the_last_chunk, "commit: 150 of 160 bytes"),
        (with_a_damaged_chunk, "chunk.crc32c"),
        (with_wrong_bytes, "BLAKE3"),
        (with_bytes_past_the_end, "past the manifest's"),
    ],
)
async def test_a_spoilt_update_changes_nothing_and_the_next_one_succeeds(
    applier: UpdateApplier,
    registry: AdapterRegistry,
    reports: Reports,
    staging: Path,
    spoil: object,
    reason: str,
) -> None:
    """Faults 4, 22 and 26: a hole or damage is refused; the last good version goes on."""
    good, events = update(1)
    await apply_all(applier, events)
    _, events = update(2, chunk_bytes=50, seed=1)
    await apply_all(applier, spoil(events))  # type: ignore[operator]
    assert registry.listing() == [good]
    assert len(list(staging.iterdir())) == 1
    assert reports.sent[-1].outcome == adapter_pb2.OUTCOME_REFUSED
    assert reason in reports.sent[-1].reason
    third, events = update(3, seed=2)
    await apply_all(applier, events)
    assert registry.listing() == [good, third]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"base_fingerprint": "another"}, "manifest.base_fingerprint: base"),
        ({"max_rank": 1}, "manifest.lora.rank: 2"),
        ({"target_modules": frozenset({"q_proj"})}, "target_modules: k_proj cannot take"),
        ({"dtypes": frozenset({Dtype.FLOAT16})}, "dtype F32 is not taken"),
        ({"max_bytes": 10}, "manifest.total_bytes"),
    ],
)
async def test_what_does_not_fit_is_refused_before_any_byte(
    registry: AdapterRegistry,
    limits: Limits,
    staging: Path,
    reports: Reports,
    change: dict[str, object],
    reason: str,
) -> None:
    applier = UpdateApplier(
        registry=registry,
        limits=replace(limits, **change),  # type: ignore[arg-type]
        staging=staging,
        metrics=Metrics(),
        report=reports,
    )
    _, events = update()
    await applier.apply(events[0])
    assert reports.sent[0].outcome == adapter_pb2.OUTCOME_REFUSED
    assert reason in reports.sent[0].reason
    await apply_all(applier, events[1:])
    assert len(reports.sent) == 1
    assert list(staging.iterdir()) == []
    assert registry.listing() == []


async def test_a_retired_version_is_not_listed(
    applier: UpdateApplier, registry: AdapterRegistry
) -> None:
    old, events = update(1)
    await apply_all(applier, events)
    new, events = update(2, seed=1)
    await apply_all(applier, events)
    await applier.apply(Event(retire=adapter_pb2.AdapterRetire(ref=ref_to_proto(old))))
    assert registry.listing() == [new]
    assert applier.metrics.registry.get_sample_value("refit_rollout_adapters_live") == 1.0


async def test_an_update_refused_after_the_retire_leaves_the_old_version_listed(
    applier: UpdateApplier, registry: AdapterRegistry, engine: FakeEngine, reports: Reports
) -> None:
    """faults.md 26, dynamo#8630: whatever the order, a refusal never empties the replica."""
    old, events = update(1)
    await apply_all(applier, events)
    await applier.apply(Event(retire=adapter_pb2.AdapterRetire(ref=ref_to_proto(old))))
    engine.answers = [BoundReport(0, 1, ("a.lora_A.weight (no module)",), "")]
    _, events = update(2, seed=1)
    await apply_all(applier, events)
    assert reports.sent[-1].outcome == adapter_pb2.OUTCOME_REFUSED
    assert registry.listing() == [old]


async def test_an_ended_stream_leaves_no_half_received_directory(
    applier: UpdateApplier, registry: AdapterRegistry, staging: Path
) -> None:
    """Fault 25: a half-written version is neither seen nor kept."""
    ref, events = update(chunk_bytes=100)
    await apply_all(applier, events[:-2])
    applier.abandon()
    assert list(staging.iterdir()) == []
    await apply_all(applier, events)
    assert registry.listing() == [ref]


@pytest.mark.parametrize("kept", [slice(1, None), slice(2, None)])
async def test_events_out_of_order_end_the_stream(applier: UpdateApplier, kept: slice) -> None:
    _, events = update()
    with pytest.raises(CorruptUpdate, match="came without a manifest"):
        await apply_all(applier, events[kept])
