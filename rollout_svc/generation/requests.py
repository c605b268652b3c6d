"""The requests that are running: their ids, how many at most, and how a drain ends them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from common.errors import AlreadyExists, QueueFull, Unavailable

log = logging.getLogger(__name__)

_ABORT_SECONDS = 5.0
_SHUTTING_DOWN = "replica: shutting down; send the request to another one"


@dataclass(slots=True)
class RunningRequests:
    """Each id runs once at a time; `drain` closes the door and sees those inside out.

    Args:
        abort: ends a request in the engine with the tokens it has.
        max_requests: as many may run and wait at a time.
    """

    abort: Callable[[str], Awaitable[None]]
    max_requests: int
    _ids: set[str] = field(default_factory=set)
    _waits: set[asyncio.Timeout] = field(default_factory=set)
    _draining: bool = False
    _grace_over: bool = False
    _empty: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._empty.set()

    @property
    def waiting(self) -> int:
        """How many the engine has not got yet."""
        return len(self._waits)

    @contextmanager
    def running(self, request_id: str) -> Iterator[None]:
        """Hold the id inside the block.

        Raises:
            AlreadyExists: a request with this id is running.
            QueueFull: as many as are taken are running.
            Unavailable: the replica is shutting down.
        """
        self._check_room(request_id)
        self._ids.add(request_id)
        self._empty.clear()
        try:
            yield
        finally:
            self._ids.remove(request_id)
            if not self._ids:
                self._empty.set()

    def _check_room(self, request_id: str) -> None:
        if self._draining:
            raise Unavailable(_SHUTTING_DOWN)
        if request_id in self._ids:
            raise AlreadyExists(f"request_id: {request_id!r} is running; choose another")
        if len(self._ids) >= self.max_requests:
            raise QueueFull(
                f"max_requests: {self.max_requests} requests are running and waiting, no more are "
                "taken; send this one later or to another replica, or raise the limit"
            )

    @asynccontextmanager
    async def admission(self) -> AsyncIterator[None]:
        """What is awaited inside, before the engine has the request, ends with the drain's grace.

        Raises:
            Unavailable: the grace is over.
        """
        if self._grace_over:
            raise Unavailable(_SHUTTING_DOWN)
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._waits.add(wait)
                yield
        except TimeoutError as error:
            if wait.expired():
                raise Unavailable(_SHUTTING_DOWN) from error
            raise
        finally:
            self._waits.discard(wait)

    async def drain(self, grace_seconds: float) -> None:
        """Let no new request in and return once the running ones have ended.

        Those that the grace is too short for end with the tokens they have. An engine that does not
        even do that is waited for `_ABORT_SECONDS` more and no longer.
        """
        self._draining = True
        if await self._ended_within(grace_seconds):
            return
        self._grace_over = True
        for wait in self._waits:
            wait.reschedule(asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(_ABORT_SECONDS):
                for request_id in list(self._ids):
                    await self.abort(request_id)
                await self._empty.wait()
        except TimeoutError:
            log.warning("%d requests did not end when asked to; they are cut off", len(self._ids))

    async def _ended_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
