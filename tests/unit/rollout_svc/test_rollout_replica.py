"""A replica as a whole, but for its engine, before trainers that are real servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from refit.v1 import adapter_pb2

from common.adapter import AdapterRef
from common.model_dir import BaseModel
from common.stream.frames import Event
from common.wire import ref_to_proto
from rollout_svc.config import RolloutConfig
from rollout_svc.replica import Replica
from tests.adapters import make_adapter
from tests.eventually import eventually
from tests.fake_engine import FakeEngine
from tests.fake_trainer import FakeTrainer, serving, update_events


def trainer_of(run_id: str, *, seed: int) -> tuple[AdapterRef, FakeTrainer]:
    manifest, buffer = make_adapter(seed=seed)
    ref = AdapterRef(run_id, "default", 1, manifest.digest())
    heartbeat = adapter_pb2.Heartbeat(interval_seconds=5, lease_seconds=15)
    return ref, FakeTrainer([Event(heartbeat=heartbeat), *update_events(ref, manifest, buffer)])


def replica_at(trainers: list[str], staging: Path, engine: FakeEngine) -> Replica:
    config = RolloutConfig(model=Path(), trainer_address=",".join(trainers), grace_seconds=0)
    base = BaseModel("model", "base")
    return Replica(config, engine, base=base, replica_id="replica", staging=staging)


@asynccontextmanager
async def running(replica: Replica) -> AsyncIterator[None]:
    stopped = asyncio.Event()
    serving = asyncio.create_task(replica.serve(stopped))
    try:
        yield
    finally:
        stopped.set()
        async with asyncio.timeout(5):
            await serving


async def test_two_trainers_bring_their_versions_side_by_side(staging: Path) -> None:
    """Each is told of its own, and their updates do not get into each other's way."""
    (one, first), (other, second) = trainer_of("one", seed=1), trainer_of("other", seed=2)
    engine = FakeEngine(slots=4)
    async with serving(first) as address, serving(second) as other_address:
        async with running(replica_at([address, other_address], staging, engine)):
            await eventually(lambda: first.reports and second.reports)
            assert sorted(engine.loaded) == [1, 2]
        for ref, trainer in ((one, first), (other, second)):
            [report] = trainer.reports
            assert report.outcome == adapter_pb2.OUTCOME_COMMITTED
            assert list(report.held) == [ref_to_proto(ref)]
            assert [(r.draining, r.reason) for r in trainer.renewals] == [(True, "SIGTERM")]
        await eventually(lambda: first.streams == second.streams == 0)


async def test_a_replica_that_is_stopped_in_the_middle_of_an_update_leaves_nothing(
    staging: Path,
) -> None:
    _, trainer = trainer_of("one", seed=1)
    commit = trainer.events.pop()
    assert commit.HasField("commit")
    engine = FakeEngine(slots=4)
    async with serving(trainer) as address, running(replica_at([address], staging, engine)):
        await eventually(lambda: list(staging.glob("*/*")))
    assert list(staging.glob("*/*")) == []
    assert (engine.loaded, trainer.reports) == ({}, [])


@pytest.mark.parametrize("trainers", [[], ["127.0.0.1:1"]])
async def test_a_replica_that_is_stopped_before_it_began_ends(
    staging: Path, trainers: list[str]
) -> None:
    async with running(replica_at(trainers, staging, FakeEngine(slots=4))):
        pass


async def test_an_engine_that_died_has_its_version_again_and_the_trainer_is_asked_for_more(
    staging: Path,
) -> None:
    """faults.md 23, TRL#6797: what a dead engine could not take comes again."""
    ref, trainer = trainer_of("one", seed=1)
    manifest, buffer = make_adapter(seed=2)
    newer = AdapterRef("one", "default", 2, manifest.digest())
    trainer.later = [list(update_events(newer, manifest, buffer))]
    engine = FakeEngine(slots=4)
    async with serving(trainer) as address, running(replica_at([address], staging, engine)):
        await eventually(lambda: len(trainer.reports) == 1)
        engine.kill()
        await eventually(lambda: len(trainer.reports) == 2)
        assert not engine.dead
        assert len(engine.loaded) == 2
    assert [list(request.held) for request in trainer.subscriptions] == [[], [ref_to_proto(ref)]]
    assert list(trainer.reports[1].held) == [ref_to_proto(ref), ref_to_proto(newer)]


async def test_a_replica_that_is_stopped_while_its_engine_starts_ends(staging: Path) -> None:
    engine = FakeEngine(slots=4)
    async with running(replica_at([], staging, engine)):
        engine.cannot_start = True
        engine.kill()
        await eventually(lambda: engine.starts)
