"""Owning tasks: nothing outlives the code that started it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first error ends the rest and is raised as it is."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel(*tasks)


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait until it has ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def ahead(items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The same, each taken as soon as it is there, however late it is asked for here."""
    queue = asyncio.Queue[tuple[T] | None]()

    async def take() -> None:
        try:
            async with aclosing(items):
                async for item in items:
                    queue.put_nowait((item,))
        finally:
            queue.put_nowait(None)

    taking = asyncio.ensure_future(take())
    try:
        while taken := await queue.get():
            yield taken[0]
        await taking
    finally:
        await cancel(taking)


async def see_through(work: Coroutine[Any, Any, T]) -> T:
    """The result of what must not stop half-way; a cancellation is raised once it has ended."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    finally:
        await asyncio.wait([running])


def stop_requested() -> asyncio.Event:
    """Set by SIGTERM or SIGINT, once called inside a running loop."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event


async def first_of(event: asyncio.Event, task: asyncio.Future[Any]) -> bool:
    """Wait for either; whether the task ended. Its error, if it has one, is raised."""
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiter, task}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel(waiter)
    if task.done():
        await task
    return task.done()
