"""Checkpoint and stop wishes from outside the loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.errors import CheckpointFailed, NoRun
from trainer_svc.control import RunControl


async def _save() -> Path:
    return Path("checkpoint")


async def test_a_wish_is_answered_after_the_step_with_its_checkpoint() -> None:
    control = RunControl("run", steps_total=5)
    wish = asyncio.ensure_future(control.checkpoint())
    await asyncio.sleep(0)

    await control.after_step(3, {"reward_mean": 0.5}, save=_save, due=False, last=False)

    assert await wish == (Path("checkpoint"), 3)
    assert (control.step, control.metrics) == (3, {"reward_mean": 0.5})
    assert control.gauges.registry.get_sample_value("refit_trainer_reward_mean") == 0.5


async def test_nothing_is_saved_unless_due_or_wished() -> None:
    async def fail() -> Path:
        raise AssertionError("not due")

    await RunControl("run", steps_total=5).after_step(1, {}, save=fail, due=False, last=False)


async def test_a_run_outlives_a_checkpoint_that_cannot_be_written_unless_it_is_the_last() -> None:
    async def fail() -> Path:
        raise CheckpointFailed("disk full")

    control = RunControl("run", steps_total=5)
    wish = asyncio.ensure_future(control.checkpoint())
    await asyncio.sleep(0)
    await control.after_step(3, {}, save=fail, due=True, last=False)
    with pytest.raises(CheckpointFailed, match="disk full"):
        await wish
    with pytest.raises(CheckpointFailed, match="disk full"):
        await control.after_step(5, {}, save=fail, due=True, last=True)


async def test_a_wish_that_the_run_does_not_live_to_fulfil_fails() -> None:
    control = RunControl("run", steps_total=5)
    wish = asyncio.ensure_future(control.checkpoint())
    await asyncio.sleep(0)
    control.ended(error=None)

    with pytest.raises(NoRun, match="ended before"):
        await wish
    with pytest.raises(NoRun, match="no run"):
        control.stop()


async def test_a_publisher_has_no_run_to_steer() -> None:
    with pytest.raises(NoRun, match="refit trainer"):
        await RunControl("run", steps_total=0).checkpoint()
