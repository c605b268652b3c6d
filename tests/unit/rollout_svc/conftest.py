"""A registry over a hand-written engine, and what feeds it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.adapter import Dtype
from common.stream.sender import Pace
from common.tasks import cancel
from rollout_svc.adapters import AdapterRegistry
from rollout_svc.limits import Limits
from rollout_svc.metrics import Metrics
from rollout_svc.relay import Relay
from rollout_svc.updates import UpdateApplier
from tests.adapters import LORA
from tests.fake_engine import FakeEngine
from tests.live import Commits
from tests.receiving import Opener, Reports


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def registry(engine: FakeEngine) -> AsyncIterator[AdapterRegistry]:
    registry = AdapterRegistry(engine=engine, slots=3, keep_versions=2, slot_wait_seconds=0.2)
    unloading = asyncio.create_task(registry.run())
    yield registry
    await cancel(unloading)


@pytest.fixture
def limits() -> Limits:
    return Limits(
        base_fingerprint="base",
        max_rank=8,
        target_modules=frozenset(LORA.target_modules),
        dtypes=frozenset(Dtype),
        max_bytes=1 << 20,
    )


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    path = tmp_path / "staging"
    path.mkdir()
    return path


@pytest.fixture
def commit(registry: AdapterRegistry, tmp_path: Path) -> Commits:
    return Commits(registry, tmp_path)


@pytest.fixture
def relay(registry: AdapterRegistry) -> Relay:
    return Relay(
        registry=registry,
        base_fingerprint="base",
        max_children=2,
        pace=Pace(chunk_bytes=64, heartbeat_seconds=0.05),
    )


@pytest.fixture
def reports(registry: AdapterRegistry) -> Reports:
    return Reports(registry)


@pytest.fixture
def applier(
    registry: AdapterRegistry, relay: Relay, limits: Limits, staging: Path, reports: Reports
) -> UpdateApplier:
    return UpdateApplier(
        source="trainer",
        registry=registry,
        relay=relay,
        limits=limits,
        staging=staging,
        metrics=Metrics(),
        report=reports,
    )


@pytest.fixture
def opened(staging: Path, limits: Limits) -> Opener:
    return Opener(staging / "update", limits)
