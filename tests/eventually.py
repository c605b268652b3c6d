"""Waiting for what happens in another task or process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def eventually(ready: Callable[[], object], *, seconds: float = 5.0) -> None:
    """Return once `ready()` is true; TimeoutError when it does not become so in time."""
    async with asyncio.timeout(seconds):
        while not ready():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
