"""A pause of generation that ends by itself."""

from __future__ import annotations

import asyncio

from common.errors import InvalidField
from rollout_svc.life.pauses import EnginePause

_LONGEST_LEASE_SECONDS = 600.0


class GenerationHold:
    """Holds the engine's pause under a lease, so that a caller that dies cannot leave it paused."""

    def __init__(self, pause: EnginePause) -> None:
        self._pause = pause
        self._changing = asyncio.Lock()
        self._lease: asyncio.Task[None] | None = None

    async def pause(self, lease_seconds: float) -> None:
        """Hold generation for at most `lease_seconds` from now; a later call renews the lease."""
        if not 0 < lease_seconds <= _LONGEST_LEASE_SECONDS:
            raise InvalidField(
                f"lease_seconds: {lease_seconds}; give above 0 and at most {_LONGEST_LEASE_SECONDS}"
            )
        async with self._changing:
            if not self._drop_lease():
                await self._pause.hold()
            self._lease = asyncio.create_task(self._expire(lease_seconds))

    async def resume(self) -> None:
        """Go on at once; without effect when nothing is held."""
        async with self._changing:
            if self._drop_lease():
                await self._pause.release()

    def close(self) -> None:
        """Forget the lease; the engine is about to end."""
        self._drop_lease()

    def _drop_lease(self) -> bool:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.cancel()
        return lease is not None

    async def _expire(self, lease_seconds: float) -> None:
        await asyncio.sleep(lease_seconds)
        async with self._changing:
            self._lease = None
            await self._pause.release()
