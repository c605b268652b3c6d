"""Waiting for a change of state inside one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Signal:
    """Wakes all who wait now; those who come later wait for the next change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait_until(self, predicate: Callable[[], bool], *, timeout_seconds: float) -> bool:
        """Whether `predicate` came true in time. It is looked at after every change."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while not predicate():
                    await self._event.wait()
        except TimeoutError:
            return predicate()
        return True
