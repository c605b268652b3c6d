"""An engine that dies, and what takes its place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from common.adapter import AdapterRef
from common.errors import Unavailable
from common.tasks import cancel
from rollout_svc.engine import EngineDead, Generation, TokenDelta
from rollout_svc.life import supervision
from rollout_svc.life.pauses import EnginePause
from rollout_svc.life.readiness import Condition, Readiness
from rollout_svc.life.sleep import Sleep
from rollout_svc.life.supervision import EngineSupervisor
from rollout_svc.metrics import STATES
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.versions.selector import Rule, Selector
from tests.eventually import eventually
from tests.fake_engine import FakeEngine
from tests.live import Commits, admit

LATEST = Selector(Rule.LATEST, "default")
FIRST = AdapterRef("run", "default", 1, bytes(32))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_HEALTH_CHECK_SECONDS", 0.002)
    monkeypatch.setattr(supervision, "_SECOND_DELAY_SECONDS", 0.01)


@pytest.fixture
def restarted() -> list[str]:
    return []


@pytest.fixture
def supervisor(
    registry: AdapterRegistry,
    engine: FakeEngine,
    pause: EnginePause,
    readiness: Readiness,
    restarted: list[str],
) -> EngineSupervisor:
    return EngineSupervisor(
        engine=engine,
        registry=registry,
        pause=pause,
        readiness=readiness,
        metrics=readiness.metrics,
        max_restarts=2,
        restarted=lambda: restarted.append("restarted"),
    )


@asynccontextmanager
async def running(supervisor: EngineSupervisor) -> AsyncIterator[asyncio.Task[None]]:
    await supervisor.readiness.gain(Condition.ADAPTER)
    task = asyncio.create_task(supervisor.run())
    try:
        yield task
    finally:
        await cancel(task)


def state(readiness: Readiness) -> str:
    values = readiness.metrics.registry.get_sample_value
    name = "refit_rollout_state"
    [current] = [each for each in STATES if values(name, {name: each}) == 1]
    return current


async def test_an_engine_that_dies_is_started_anew_with_what_it_held(
    supervisor: EngineSupervisor,
    registry: AdapterRegistry,
    engine: FakeEngine,
    readiness: Readiness,
    commit: Commits,
    restarted: list[str],
) -> None:
    """faults.md 6: it serves nobody before it has the newest version again."""
    await commit(FIRST)
    async with running(supervisor):
        await eventually(lambda: state(readiness) == "serving")
        engine.cannot_start = True
        engine.kill()
        await eventually(lambda: state(readiness) == "starting")
        with pytest.raises(Unavailable, match="it ended and is being started anew"):
            async with admit(registry, LATEST, wait_seconds=5):
                pass
        assert restarted == []
        engine.cannot_start = False
        await eventually(lambda: state(readiness) == "serving")
    assert [adapter.path for adapter in engine.loaded.values()] == commit.paths
    assert [ref.version for ref in registry.listing()] == [1]
    assert restarted == ["restarted"]
    counted = readiness.metrics.registry.get_sample_value("refit_rollout_engine_restarts_total")
    assert counted == 1


@dataclass(slots=True)
class _Forgetful(FakeEngine):
    forgets: bool = True

    async def generate(self, generation: Generation) -> AsyncGenerator[TokenDelta, None]:
        while self.forgets:
            await asyncio.Event().wait()
        async for delta in FakeEngine.generate(self, generation):
            yield delta


async def test_an_engine_that_dies_in_its_warm_up_and_does_not_say_so_is_started_anew(
    supervisor: EngineSupervisor, restarted: list[str]
) -> None:
    """faults.md 23: a request that comes as the engine dies may never be answered."""
    supervisor.engine = engine = _Forgetful()
    async with running(supervisor):
        await asyncio.sleep(0.01)
        engine.forgets = False
        engine.kill()
        await eventually(lambda: restarted)
    assert not engine.dead


async def test_an_update_waits_for_the_engine_that_is_being_started(
    supervisor: EngineSupervisor, registry: AdapterRegistry, engine: FakeEngine, commit: Commits
) -> None:
    """faults.md 26: it is loaded once, into the new one."""
    async with running(supervisor):
        engine.cannot_start = True
        engine.kill()
        await eventually(lambda: registry.uses.refuses)
        committing = asyncio.create_task(commit(FIRST))
        await asyncio.sleep(0)
        engine.cannot_start = False
        await committing
    assert [adapter.path for adapter in engine.loaded.values()] == commit.paths


async def test_an_update_is_refused_where_the_start_takes_too_long(
    supervisor: EngineSupervisor,
    registry: AdapterRegistry,
    engine: FakeEngine,
    commit: Commits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """faults.md 23, 26: the wait has an end, and nothing is left of it."""
    monkeypatch.setattr(supervision, "_SECOND_DELAY_SECONDS", 60.0)
    async with running(supervisor):
        engine.cannot_start = True
        engine.kill()
        await eventually(lambda: registry.uses.refuses)
        with pytest.raises(Unavailable, match=r"slot_wait_seconds: for 0.2 s the engine slept"):
            await commit(FIRST)
    assert registry.listing() == []
    assert not commit.paths[0].exists()


async def test_engines_that_fail_in_a_row_end_the_replica(
    supervisor: EngineSupervisor, engine: FakeEngine
) -> None:
    async with running(supervisor) as task:
        engine.cannot_start = True
        engine.kill()
        with pytest.raises(
            EngineDead,
            match="engine_restarts: 2, and the engine failed 3 times in a row; the last time: the "
            "engine did not start",
        ):
            async with asyncio.timeout(5):
                await task


async def test_no_restart_at_all(supervisor: EngineSupervisor, engine: FakeEngine) -> None:
    supervisor.max_restarts = 0
    async with running(supervisor) as task:
        engine.kill()
        with pytest.raises(EngineDead, match="engine_restarts: 0, and the engine failed 1 times"):
            async with asyncio.timeout(5):
                await task


async def test_health_begins_a_new_row(
    supervisor: EngineSupervisor,
    engine: FakeEngine,
    restarted: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervision, "_HEALTHY_SECONDS", 0.0)
    async with running(supervisor) as task:
        for number in range(5):
            engine.kill()
            await eventually(lambda: len(restarted) == number + 1)  # noqa: B023
            await eventually(lambda: supervisor._up_since)
        assert not task.done()


def test_delays_double_after_the_first_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_SECOND_DELAY_SECONDS", 1.0)
    delays = [supervision._delay_seconds(failures) for failures in range(1, 9)]
    assert delays == [0, 1, 2, 4, 8, 16, 32, 60]


async def test_an_engine_that_dies_asleep_is_started_when_it_is_woken(
    supervisor: EngineSupervisor,
    sleep: Sleep,
    registry: AdapterRegistry,
    engine: FakeEngine,
    readiness: Readiness,
    restarted: list[str],
    commit: Commits,
) -> None:
    await commit(FIRST)
    async with running(supervisor):
        await eventually(lambda: state(readiness) == "serving")
        await sleep.begin()
        engine.kill()
        await eventually(lambda: state(readiness) == "starting")
        assert restarted == []
        await sleep.end()
        await eventually(lambda: state(readiness) == "serving")
    assert (restarted, len(engine.loaded), engine.asleep) == (["restarted"], 1, False)


async def test_a_pause_by_lease_holds_after_a_restart(
    supervisor: EngineSupervisor, engine: FakeEngine, pause: EnginePause, restarted: list[str]
) -> None:
    async with running(supervisor):
        await eventually(lambda: supervisor._up_since)
        await pause.hold()
        engine.kill()
        await eventually(lambda: restarted)
        assert engine.paused
        await pause.release()
        assert not engine.paused
