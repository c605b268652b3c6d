"""The requests that are running: their ids, and whether new ones are let in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from common.errors import AlreadyExists, Unavailable


@dataclass(slots=True)
class RunningRequests:
    """Each id runs once at a time; `drain` closes the door and waits for those inside."""

    _ids: set[str] = field(default_factory=set)
    _draining: bool = False
    _empty: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def running(self, request_id: str) -> Iterator[None]:
        """Hold the id inside the block.

        Raises:
            AlreadyExists: a request with this id is running.
            Unavailable: the replica is shutting down.
        """
        if self._draining:
            raise Unavailable("replica: shutting down; send the request to another one")
        if request_id in self._ids:
            raise AlreadyExists(f"request_id: {request_id!r} is running; choose another")
        self._ids.add(request_id)
        try:
            yield
        finally:
            self._ids.remove(request_id)
            if not self._ids:
                self._empty.set()

    async def drain(self, grace_seconds: float) -> bool:
        """Let no new request in; True when the running ones ended within the grace."""
        self._draining = True
        if not self._ids:
            return True
        self._empty.clear()
        try:
            async with asyncio.timeout(grace_seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
