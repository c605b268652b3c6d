from __future__ import annotations

import asyncio

import pytest

from common.errors import WaitExpired
from tests.eventually import eventually
from trainer_svc.rl.ahead import Ahead


class Maker:
    """Makes "s<step>", never for a step in `stuck`, and fails for step 3; remembers what it did."""

    def __init__(self, *, stuck: int = 0) -> None:
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self._stuck = stuck

    async def __call__(self, step: int) -> str:
        self.begun.append(step)
        if step == self._stuck:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.append(step)
        if step == 3:
            raise WaitExpired("step 3")
        return f"s{step}"


async def test_without_steps_ahead_nothing_runs_while_a_step_trains() -> None:
    make = Maker()
    ahead = Ahead(make, steps=0, last=9)
    assert await ahead.take(1) == "s1"
    await asyncio.sleep(0)
    assert make.begun == [1]
    assert await ahead.take(2) == await ahead.take(2) == "s2"
    assert make.begun == [1, 2, 2], "what was taken is not kept"


async def test_so_many_steps_are_begun_ahead_and_none_after_the_last() -> None:
    make = Maker()
    ahead = Ahead(make, steps=2, last=4)
    assert await ahead.take(1) == "s1"
    await eventually(lambda: make.begun == [1, 2, 3])
    assert await ahead.take(2) == "s2"
    await eventually(lambda: make.begun == [1, 2, 3, 4])
    with pytest.raises(WaitExpired, match="step 3"):
        await ahead.take(3)
    assert await ahead.take(4) == "s4"
    assert make.begun == [1, 2, 3, 4]


async def test_clear_ends_what_runs_and_forgets_what_was_made() -> None:
    make = Maker(stuck=3)
    ahead = Ahead(make, steps=2, last=4)
    assert await ahead.take(1) == "s1"
    await eventually(lambda: make.begun == [1, 2, 3])
    await ahead.clear()
    assert make.cancelled == [3]
    assert await ahead.take(2) == "s2"
    assert make.begun[:4] == [1, 2, 3, 2]
    await ahead.clear()
