"""Who holds the engine's pause, and what is left of it when somebody lets go or the engine dies."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from common.errors import InvalidField
from rollout_svc.engine import EngineDead
from rollout_svc.life.hold import GenerationHold
from rollout_svc.life.pauses import EnginePause
from tests.eventually import eventually
from tests.fake_engine import FakeEngine


async def test_a_leased_pause_outlives_the_pause_of_a_swap(
    engine: FakeEngine, pause: EnginePause
) -> None:
    """faults.md 22: the swap's own resume ends nobody else's hold."""
    hold = GenerationHold(pause)
    await hold.pause(lease_seconds=60)
    async with pause.held():
        assert engine.paused
    assert engine.paused
    await hold.resume()
    assert not engine.paused


async def test_a_lease_that_expires_ends_its_own_hold_alone(
    engine: FakeEngine, pause: EnginePause
) -> None:
    hold = GenerationHold(pause)
    async with pause.held():
        await hold.pause(lease_seconds=0.01)
        await eventually(lambda: hold._lease is None)
        assert engine.paused
    assert not engine.paused


async def test_a_renewed_lease_counts_once_and_a_second_resume_not_at_all(
    engine: FakeEngine, pause: EnginePause
) -> None:
    hold = GenerationHold(pause)
    await hold.pause(lease_seconds=60)
    await hold.pause(lease_seconds=60)
    await hold.resume()
    assert not engine.paused
    async with pause.held():
        await hold.resume()
        assert engine.paused


@pytest.mark.parametrize("seconds", [0, -1, 601])
async def test_a_lease_that_is_none_is_refused(pause: EnginePause, seconds: float) -> None:
    with pytest.raises(InvalidField, match=f"lease_seconds: {seconds}; give above 0"):
        await GenerationHold(pause).pause(seconds)


async def test_a_hold_outlives_the_engine_it_was_made_for(
    engine: FakeEngine, pause: EnginePause
) -> None:
    """What is started in its place generates for its warm-up, and is paused then."""
    hold = GenerationHold(pause)
    await hold.pause(lease_seconds=60)
    engine.kill()
    async with pause.away():
        await engine.restart()
        async with pause.held():
            assert not engine.paused
    assert engine.paused
    await hold.resume()
    assert not engine.paused


async def test_a_lease_may_begin_and_end_while_the_engine_is_away(
    engine: FakeEngine, pause: EnginePause
) -> None:
    hold = GenerationHold(pause)
    await hold.pause(lease_seconds=60)
    engine.kill()
    async with pause.away():
        await hold.resume()
        await engine.restart()
    assert not engine.paused
    async with pause.away():
        await hold.pause(lease_seconds=60)
    assert engine.paused


async def test_a_dead_engine_can_be_let_go_but_not_held(
    engine: FakeEngine, pause: EnginePause
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with pause.held():
            engine.kill()
            raise ZeroDivisionError
    with pytest.raises(EngineDead):
        await pause.hold()
    await engine.restart()
    await pause.hold()
    await pause.release()
    assert not engine.paused


@dataclass(slots=True)
class _SlowToAnswer(FakeEngine):
    answers_pauses: asyncio.Event = field(default_factory=asyncio.Event)

    async def pause(self) -> None:
        await FakeEngine.pause(self)
        await self.answers_pauses.wait()


async def test_a_caller_that_is_gone_before_the_pause_is_leaves_none() -> None:
    """faults.md 22: the engine may have heard of it."""
    engine = _SlowToAnswer()
    pausing = asyncio.create_task(EnginePause(engine).hold())
    await eventually(lambda: engine.paused)
    pausing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pausing
    assert not engine.paused
