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
from rollout_svc.versions.live import LiveAdapter

Which: TypeAlias = Callable[[LiveAdapter | None], bool]
"""Of the version that a request was admitted to; None is the base model."""

_AGAIN_SECONDS = 0.2
"""An engine heeds no abort of a request that it has not begun: it is told again."""


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
    _lives: dict[str, LiveAdapter | None] = field(default_factory=dict)
    _closed: int = 0
    _refusals: list[str] = field(default_factory=list)

    @property
    def open(self) -> bool:
        """Whether a request may pass now."""
        return not self._closed

    def __len__(self) -> int:
        return len(self._lives)

    @contextmanager
    def using(self, request_id: str, live: LiveAdapter | None) -> Iterator[None]:
        """Count the request inside the block; its id is no other's."""
        self._lives[request_id] = live
        if live:
            live.pins += 1
        try:
            yield
        finally:
            del self._lives[request_id]
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
        if not await self.changed.wait_until(
            lambda: not self._ids(which), timeout_seconds=wait_seconds
        ):
            raise Unavailable(
                f"slot_wait_seconds: {len(self._ids(which))} requests still ran on the old weights "
                f"after {wait_seconds:g} s; raise it or shorten the generations"
            )

    async def end(self, which: Which, *, wait_seconds: float) -> None:
        """Have these requests end with the tokens they have, and see them out.

        Raises:
            Unavailable: they have not ended in time.
        """
        deadline = asyncio.get_running_loop().time() + wait_seconds
        while ids := self._ids(which):
            for request_id in ids:
                # Those of a dead engine end by themselves.
                with suppress(EngineDead):
                    await self.abort(request_id)
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                await self.wait_for_end(which, wait_seconds=0)
            await self.changed.wait_until(
                lambda: not self._ids(which), timeout_seconds=min(left, _AGAIN_SECONDS)
            )

    def _ids(self, which: Which) -> list[str]:
        return [request_id for request_id, live in self._lives.items() if which(live)]
