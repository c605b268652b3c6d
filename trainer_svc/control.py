"""The run as others see it, and what they may ask of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from refit.v1 import trainer_pb2

from common.errors import CheckpointFailed, NoRun, RefitError
from trainer_svc.metrics import StepGauges

log = logging.getLogger(__name__)

_Wish = asyncio.Future[tuple[Path, int]]
"""For the checkpoint at the end of the running step, and its step."""

_ENDED = (trainer_pb2.RUN_STATE_FINISHED, trainer_pb2.RUN_STATE_FAILED)


class RunControl:
    """Shared by the loop, which moves it, and the servicer, which shows it and passes wishes on."""

    def __init__(self, run_id: str, *, steps_total: int) -> None:
        self.run_id = run_id
        self.steps_total = steps_total
        self.step = 0
        self.state = trainer_pb2.RUN_STATE_STARTING
        self.metrics: dict[str, float] = {}
        self.gauges = StepGauges()
        self.message = ""
        self.stopping = False
        self._wishes: list[_Wish] = []

    async def checkpoint(self) -> tuple[Path, int]:
        """Wait for the checkpoint at the end of the running step: its directory and step.

        Raises:
            NoRun: nothing is being trained, or the run ended before it was written.
        """
        self._need_run()
        wish: _Wish = asyncio.get_running_loop().create_future()
        self._wishes.append(wish)
        return await wish

    def stop(self) -> None:
        """End the run after the running step. Raises `NoRun` when there is none."""
        self._need_run()
        self.stopping = True

    async def after_step(
        self,
        step: int,
        metrics: dict[str, float],
        *,
        save: Callable[[], Awaitable[Path]],
        due: bool,
        last: bool,
    ) -> None:
        """Called by the loop between steps; saves when it is time to, or when somebody asked.

        Raises:
            CheckpointFailed: the last one could not be written; a run goes on without another.
        """
        self.step, self.metrics = step, metrics
        self.gauges.show(metrics)
        wishes, self._wishes = self._wishes, []
        if due or wishes:
            try:
                path = await save()
            except CheckpointFailed as error:
                _fail(wishes, error)
                if last:
                    raise
                log.error("%s; going on", error)
                return
            for wish in wishes:
                if not wish.done():
                    wish.set_result((path, step))

    def ended(self, *, error: BaseException | None) -> None:
        self.state = trainer_pb2.RUN_STATE_FAILED if error else trainer_pb2.RUN_STATE_FINISHED
        self.message = str(error) if error else ""
        _fail(self._wishes, NoRun("the run ended before the checkpoint; see its last one"))

    def _need_run(self) -> None:
        if self.state in _ENDED or not self.steps_total:
            raise NoRun("no run is in progress; start one with `refit trainer`")


def _fail(wishes: list[_Wish], error: RefitError) -> None:
    for wish in wishes:
        if not wish.done():
            wish.set_exception(error)
