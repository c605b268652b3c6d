"""Updates that the staging directory cannot hold are refused; the next one is taken."""

from __future__ import annotations

import errno
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from refit.v1 import adapter_pb2

from common.wire import ref_to_proto
from rollout_svc.updates.applier import UpdateApplier
from rollout_svc.versions.registry import AdapterRegistry
from tests.adapters import make_adapter, make_ref
from tests.applying import REFUSED, apply_all, update
from tests.fake_trainer import update_events
from tests.receiving import Reports


async def test_more_than_the_file_system_has_is_refused_by_stage(
    applier: UpdateApplier, reports: Reports, registry: AdapterRegistry, staging: Path
) -> None:
    """tmpfs full: both figures are named, nothing is left, and the next update succeeds."""
    applier.limits = replace(applier.limits, max_bytes=1 << 62)
    manifest, buffer = make_adapter()
    a, _, b, _ = manifest.tensors
    huge = replace(a, shape=(2, 1 << 44))
    whole = replace(manifest, tensors=(huge, replace(b, offset_bytes=huge.size_bytes)))
    await applier.apply(next(update_events(make_ref(whole), whole, buffer)))
    [report] = reports.sent
    assert report.stage == adapter_pb2.UPDATE_STAGE_STAGE
    pattern = (
        r"(No space left on device|File too large); an update needs 140737\d{9} bytes, \d+ are"
    )
    assert re.search(pattern, report.reason)
    assert list(staging.iterdir()) == []
    ref, events = update()
    await apply_all(applier, events)
    assert registry.listing() == [ref]


def failing(*_: object) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize(("call", "begins"), [("os.posix_fallocate", 0), ("os.pwrite", 1)])
async def test_an_error_of_the_file_system_is_refused_by_stage(
    applier: UpdateApplier,
    registry: AdapterRegistry,
    reports: Reports,
    staging: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    begins: int,
) -> None:
    """While room is made, or while bytes are written; the next update is taken."""
    good, events = update(1)
    await apply_all(applier, events)
    refused, events = update(2, seed=1)
    await apply_all(applier, events[:begins])
    with monkeypatch.context() as patched:
        patched.setattr(call, failing)
        await apply_all(applier, events[begins:])
    report = reports.sent[-1]
    assert (report.outcome, report.stage) == (REFUSED, adapter_pb2.UPDATE_STAGE_STAGE)
    assert report.ref == ref_to_proto(refused)
    text = f"staging directory {staging}: Too many open files; see to it and retry"
    assert report.reason == text
    assert len(reports.sent) == 2
    assert len(list(staging.iterdir())) == 1
    third, events = update(3, seed=2)
    await apply_all(applier, events)
    assert registry.listing() == [good, third]


async def test_an_error_while_aliases_are_written_is_refused_by_stage(
    applier: UpdateApplier,
    registry: AdapterRegistry,
    reports: Reports,
    staging: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest, buffer = make_adapter()
    events = list(update_events(make_ref(manifest), manifest, buffer, chunk_bytes=50))
    await apply_all(applier, events[:-1])
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", failing)
        await applier.apply(events[-1])
    [report] = reports.sent
    assert (report.outcome, report.stage) == (REFUSED, adapter_pb2.UPDATE_STAGE_STAGE)
    assert list(staging.iterdir()) == []
    await apply_all(applier, events)
    assert registry.listing() == [make_ref(manifest)]


async def test_a_swept_staging_directory_stops_nothing(
    applier: UpdateApplier, registry: AdapterRegistry, staging: Path
) -> None:
    _, events = update(1)
    await apply_all(applier, events[:3])
    shutil.rmtree(staging)
    applier.suspend()
    ref, events = update(2, seed=1)
    await apply_all(applier, events)
    assert registry.listing() == [ref]
