"""The requests that are computed with, and the door that each of them passes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from common.errors import Unavailable
from common.signal import Signal
from rollout_svc.engine import EngineDead
from rollout_svc.versions.live import LiveAdapter, Use

Which: TypeAlias = Callable[[LiveAdapter | None], bool]
"""Of the version that a request was admitted to; None is the base model."""

_AGAIN_SECONDS = 0.2
"""An engine heeds no abort of a request that it has not begun: it is told again."""


def everybody(_live: LiveAdapter | None) -> bool:
    return True


@dataclass(slots=True)
class Uses:
    """Who uses what.

    with uses.using(request_id, live):
        ...  # `live` stays loaded, and the weights are not replaced under it

    Args:
        abort: ends a request in the engine with the tokens it has.
    """

    abort: Callable[[str], Awaitable[None]]
    changed: Signal = field(default_factory=Signal)
    _uses: dict[str, Use] = field(default_factory=dict)
    _closed: int = 0
    _refusals: list[str] = field(default_factory=list)

    @property
    def open(self) -> bool:
        """Whether a request may pass now."""
        return not self._closed

    def __len__(self) -> int:
        return len(self._uses)

    @contextmanager
    def using(self, request_id: str, live: LiveAdapter | None) -> Iterator[Use]:
        """Count the request inside the block; its id is no other's."""
        use = self._uses[request_id] = Use(live)
        if live:
            live.pins += 1
        try:
            yield use
        finally:
            del self._uses[request_id]
            if live:
                live.pins -= 1
            self.changed.notify()

    @contextmanager
    def closed(self, *, because: str = "") -> Iterator[None]:
        """New requests wait until the block ends; where a reason is given, they are refused.

        Those that wait already are refused as well.
        """
        self._closed += 1
        if because:
            self._refusals.append(because)
        try:
            self.changed.notify()
            yield
        finally:
            self._closed -= 1
            if because:
                self._refusals.remove(because)
            self.changed.notify()

    @property
    def refuses(self) -> bool:
        return bool(self._refusals)

    def check_taken(self) -> None:
        """Raises `Unavailable` while requests are refused."""
        if self._refusals:
            raise Unavailable(self._refusals[-1])

    async def wait_for_end(self, which: Which, *, wait_seconds: float) -> None:
        """Return once none of these requests runs; raises `Unavailable` if that takes longer."""

        def ids() -> list[str]:
            return self._ids(lambda use: which(use.live))

        if not await self.changed.wait_until(lambda: not ids(), timeout_seconds=wait_seconds):
            raise _still_running(ids(), wait_seconds)

    async def end(self, which: Which, *, wait_seconds: float) -> None:
        """Have these requests end with the tokens they have, and see them out.

        Raises:
            Unavailable: they have not ended in time.
        """
        await self._end(lambda use: which(use.live), wait_seconds)

    async def begin_anew(self, which: Which, *, wait_seconds: float) -> None:
        """Have those of these requests that have not begun come to the door again, and see them
        there; it is closed.

        Raises:
            Unavailable: they did not come in time.
        """
        for use in self._uses.values():
            use.anew = which(use.live) and not use.begun
        await self._end(lambda use: use.anew, wait_seconds)

    async def _end(self, which: Callable[[Use], bool], wait_seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + wait_seconds
        while ids := self._ids(which):
            for request_id in ids:
                # Those of a dead engine end by themselves.
                with suppress(EngineDead):
                    await self.abort(request_id)
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise _still_running(ids, wait_seconds)
            await self.changed.wait_until(
                lambda: not self._ids(which), timeout_seconds=min(left, _AGAIN_SECONDS)
            )

    def _ids(self, which: Callable[[Use], bool]) -> list[str]:
        return [request_id for request_id, use in self._uses.items() if which(use)]


def _still_running(ids: list[str], wait_seconds: float) -> Unavailable:
    return Unavailable(
        f"slot_wait_seconds: {len(ids)} requests still ran on the old weights after "
        f"{wait_seconds:g} s; raise it or shorten the generations"
    )
