"""Pauses of generation, counted: whoever lets go last has the engine go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from common.errors import RefitError
from common.tasks import see_through
from rollout_svc.engine import Engine, EngineDead


@dataclass(slots=True)
class EnginePause:
    """The engine's one pause, shared by those who need it.

    async with pause.held():
        ...  # running requests are frozen, new ones wait
    """

    engine: Engine
    _holders: int = 0
    _away: bool = False
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Generation stands still inside the block."""
        await self.hold()
        try:
            yield
        finally:
            await self.release()

    async def hold(self) -> None:
        """Pause; each call wants a `release`."""
        async with self._changing:
            if not self._holders and not self._away:
                await self._pause()
            self._holders += 1

    async def release(self) -> None:
        """Go on, unless somebody else holds it."""
        await see_through(self._release())

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """The engine is started anew, or sleeps, inside the block, and nobody generates.

        A hold only counts meanwhile, and stops the engine from the end of the block on.
        """
        self._away = True
        try:
            yield
        finally:
            await see_through(self._come_back())

    async def _pause(self) -> None:
        try:
            await self.engine.pause()
        except BaseException:
            # It may have been heard all the same.
            with suppress(RefitError):
                await self.engine.resume()
            raise

    async def _release(self) -> None:
        async with self._changing:
            self._holders -= 1
            if not self._holders and not self._away:
                # What takes the place of a dead engine is not paused.
                with suppress(EngineDead):
                    await self.engine.resume()

    async def _come_back(self) -> None:
        async with self._changing:
            self._away = False
            if self._holders:
                with suppress(EngineDead):
                    await self.engine.pause()
