"""Work for the steps to come, done while an earlier one trains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from common.tasks import cancel

T = TypeVar("T")


class Ahead(Generic[T]):
    """Makes what each step needs, at most `steps` steps ahead.

        ahead = Ahead(sample, steps=1, last=100)
        samples = await ahead.take(1)   # sample(2) begins
        ...                             # train on the samples of step 1
        await ahead.clear()

    With 0 steps nothing runs while a step trains.
    """

    def __init__(
        self, make: Callable[[int], Coroutine[Any, Any, T]], *, steps: int, last: int
    ) -> None:
        self._make, self._steps, self._last = make, steps, last
        self._tasks: dict[int, asyncio.Task[T]] = {}

    async def take(self, step: int) -> T:
        """What was made for `step`, or its error; then those after it are begun, in order."""
        self._begin(step)
        made = await self._tasks[step]
        del self._tasks[step]
        for later in range(step + 1, min(step + self._steps, self._last) + 1):
            self._begin(later)
        return made

    async def clear(self) -> None:
        """End what still runs, and forget what was made."""
        tasks, self._tasks = self._tasks, {}
        await cancel(*tasks.values())

    def _begin(self, step: int) -> None:
        if step not in self._tasks:
            self._tasks[step] = asyncio.ensure_future(self._make(step))
