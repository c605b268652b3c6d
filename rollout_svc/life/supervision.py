"""Sees that the engine answers, and starts it anew when it does not."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from common.errors import RefitError
from common.tasks import cancel
from rollout_svc.engine import Engine, EngineDead
from rollout_svc.life.pauses import EnginePause
from rollout_svc.life.readiness import Condition, Readiness
from rollout_svc.life.warm_up import warm_up
from rollout_svc.metrics import Metrics
from rollout_svc.versions.registry import AdapterRegistry

log = logging.getLogger(__name__)

_HEALTH_CHECK_SECONDS = 0.25
_NOTICED_SECONDS = 5.0
"""By then every request that reads its answer has heard of the engine's death."""

_SECOND_DELAY_SECONDS = 1.0
_LONGEST_DELAY_SECONDS = 60.0
_HEALTHY_SECONDS = 600.0
_RESTARTING = (
    "engine: it ended and is being started anew; send the request again, or to another replica"
)


@dataclass(slots=True)
class EngineSupervisor:
    """Warms the engine up, and again each time after it died and was started anew.

    Until an engine holds what the one before it held, no request is let in and no update committed.

    Args:
        max_restarts: as many in a row; a failure after ten minutes of health begins a new row.
        restarted: called once a new engine serves: what came to a dead one was refused.
    """

    engine: Engine
    registry: AdapterRegistry
    pause: EnginePause
    readiness: Readiness
    metrics: Metrics
    max_restarts: int
    restarted: Callable[[], None]
    _failures: int = 0
    _up_since: float = 0.0

    async def run(self) -> None:
        """Until cancelled.

        Raises:
            EngineDead: it failed once more than it may be restarted in a row.
        """
        if failure := await self._warm_up():
            await self._recover(failure)
        while True:
            self._up_since = time.monotonic()
            await self.readiness.gain(Condition.ENGINE)
            failure = await self._death()
            await self.readiness.lose(Condition.ENGINE)
            await self._recover(failure)

    async def _death(self) -> EngineDead:
        """vLLM tells of it by a flag that a thread sets, so it is polled."""
        while True:
            try:
                await self.engine.check_health()
                self.registry.weights.check_whole()
            except EngineDead as error:
                return error
            await asyncio.sleep(_HEALTH_CHECK_SECONDS)

    async def _recover(self, failure: RefitError | None) -> None:
        stopped = self.registry.stopped(
            grace_seconds=_NOTICED_SECONDS, because=_RESTARTING, is_dead=True
        )
        async with stopped, self.pause.away():
            while failure:
                await self._back_off(failure)
                failure = await self._restart()
        self.restarted()

    async def _restart(self) -> RefitError | None:
        begun = time.monotonic()
        try:
            await self.engine.restart()
            await self.registry.reload()
        except RefitError as error:
            return error
        if failure := await self._warm_up():
            return failure
        self.metrics.engine_restarts.inc()
        log.warning("the engine was started anew in %.1f s", time.monotonic() - begun)
        return None

    async def _warm_up(self) -> RefitError | None:
        """Its health is asked for beside: a request that comes as it dies may never be answered."""
        dying = asyncio.ensure_future(self._death())
        warming = asyncio.ensure_future(_failure(warm_up(self.engine)))
        try:
            await asyncio.wait({dying, warming}, return_when=asyncio.FIRST_COMPLETED)
            return dying.result() if dying.done() else warming.result()
        finally:
            await cancel(dying, warming)

    async def _back_off(self, failure: RefitError) -> None:
        """Wait longer after each failure in a row; raises `EngineDead` after the last."""
        if self._up_since and time.monotonic() - self._up_since > _HEALTHY_SECONDS:
            self._failures = 0
        self._up_since = 0.0
        self._failures += 1
        if self._failures > self.max_restarts:
            raise EngineDead(
                f"engine_restarts: {self.max_restarts}, and the engine failed {self._failures} "
                f"times in a row; the last time: {failure}"
            ) from failure
        log.error("engine failure %d of a row: %s", self._failures, failure)
        await asyncio.sleep(_delay_seconds(self._failures))


def _delay_seconds(failures: int) -> float:
    """None before the first restart, then doubling from one second on."""
    if failures == 1:
        return 0.0
    return min(_SECOND_DELAY_SECONDS * 2.0 ** (failures - 2), _LONGEST_DELAY_SECONDS)


async def _failure(work: Coroutine[Any, Any, None]) -> RefitError | None:
    try:
        await work
    except RefitError as error:
        return error
    return None
