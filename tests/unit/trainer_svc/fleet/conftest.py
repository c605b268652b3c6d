"""A fleet whose versions are published by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.model_dir import BaseModel
from common.stream.sender import Pace
from tests.subscriptions import Run
from trainer_svc.fleet import Fleet
from trainer_svc.publisher import Publisher

PACE = Pace(heartbeat_seconds=0.05, lease_seconds=0.2, stall_seconds=0.1)


@pytest.fixture
async def run() -> AsyncIterator[Run]:
    publisher = Publisher("run", keep=2, pace=PACE)
    fleet = Fleet(BaseModel("m", "base"), publisher)
    async with asyncio.timeout(10):
        yield Run(fleet, publisher)
    publisher.close()
    await fleet.close()
