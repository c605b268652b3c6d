"""An engine that gives its accelerator's memory back for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

from common.errors import Incompatible
from common.tasks import see_through
from rollout_svc.engine import Engine, EngineDead
from rollout_svc.life.pauses import EnginePause
from rollout_svc.life.readiness import Condition, Readiness
from rollout_svc.versions.registry import AdapterRegistry

_ASLEEP = "replica: asleep; send the request to another one, or wake it up"


@dataclass(slots=True)
class Sleep:
    """Between `begin` and `end` no request is let in and no update committed.

    An engine that dies meanwhile is started anew once it is to wake.

    Args:
        enabled: the engine was started for it.
        grace_seconds: how long running requests may go on before they are aborted.
        woken: called once requests are let in again: updates that waited too long were refused.
    """

    engine: Engine
    registry: AdapterRegistry
    pause: EnginePause
    readiness: Readiness
    enabled: bool
    grace_seconds: float
    woken: Callable[[], None]
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _asleep: AsyncExitStack | None = None

    async def begin(self) -> None:
        """Free the accelerator's memory; without effect on one that sleeps.

        Raises:
            Incompatible: the engine cannot sleep.
            Unavailable: requests did not even end when they were aborted; nothing has changed.
        """
        if not self.enabled:
            raise Incompatible(
                "engine.enable_sleep_mode: not set, so the engine cannot sleep; start the replica "
                "with it, on an accelerator"
            )
        async with self._changing, AsyncExitStack() as stack:
            if self._asleep is not None:
                return
            stack.push_async_callback(self.readiness.gain, Condition.AWAKE)
            await self.readiness.lose(Condition.AWAKE)
            stopped = self.registry.stopped(grace_seconds=self.grace_seconds, because=_ASLEEP)
            await stack.enter_async_context(stopped)
            await stack.enter_async_context(self.pause.away())
            stack.push_async_callback(self._wake)
            await self.engine.sleep()
            self._asleep = stack.pop_all()

    async def end(self) -> None:
        """Serve again; without effect on one that is awake."""
        async with self._changing:
            asleep, self._asleep = self._asleep, None
            if asleep is not None:
                await see_through(asleep.aclose())
                self.woken()

    async def _wake(self) -> None:
        with suppress(EngineDead):
            await self.engine.wake_up()
