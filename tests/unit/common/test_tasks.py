"""Owned tasks and signals inside one loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from common.signal import Signal
from common.tasks import ahead, first_of, gather_or_cancel


async def test_the_first_error_ends_the_rest_and_comes_as_it_is() -> None:
    ended = []

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def fail() -> None:
        await asyncio.sleep(0)
        raise LookupError("x")

    with pytest.raises(LookupError):
        await gather_or_cancel([wait_for_ever(), fail()])

    assert ended == [True]


async def test_first_of_raises_the_error_of_the_task() -> None:
    async def fail() -> None:
        raise LookupError("x")

    with pytest.raises(LookupError):
        await first_of(asyncio.Event(), asyncio.ensure_future(fail()))


async def test_first_of_leaves_the_task_running_when_the_event_comes() -> None:
    event = asyncio.Event()
    event.set()
    task = asyncio.ensure_future(asyncio.Event().wait())

    assert await first_of(event, task) is False
    assert not task.done()
    task.cancel()


async def test_ahead_takes_what_is_not_asked_for_and_raises_what_comes_after_it() -> None:
    async def items() -> AsyncGenerator[int, None]:
        yield 1
        yield 2
        taken.set()
        raise LookupError("x")

    taken, found = asyncio.Event(), list[int]()
    async with aclosing(ahead(items())) as read:
        found.append(await anext(read))
        await asyncio.wait_for(taken.wait(), 1)
        with pytest.raises(LookupError):
            async for item in read:
                found.append(item)
    assert found == [1, 2]


async def test_ahead_ends_what_it_reads_when_it_is_closed() -> None:
    async def items() -> AsyncGenerator[int, None]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            ended.set()

    ended = asyncio.Event()
    async with aclosing(ahead(items())) as read:
        assert await anext(read) == 1
    assert ended.is_set()


async def test_a_signal_wakes_until_the_predicate_holds_or_time_is_up() -> None:
    signal, values = Signal(), [0]
    waiting = asyncio.ensure_future(signal.wait_until(lambda: values[0] == 2, timeout_seconds=5))
    for value in (1, 2):
        await asyncio.sleep(0)
        values[0] = value
        signal.notify()

    assert await waiting is True
    assert await signal.wait_until(lambda: False, timeout_seconds=0.01) is False
