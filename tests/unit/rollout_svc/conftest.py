"""A registry over a hand-written engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.adapter import Dtype
from common.tasks import cancel
from rollout_svc.adapters import AdapterRegistry
from rollout_svc.receiver import Limits
from tests.adapters import LORA
from tests.fake_engine import FakeEngine


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
