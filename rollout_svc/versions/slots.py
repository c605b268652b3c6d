"""The engine's LoRA slots: which adapters are in them, and which may not leave."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from common.errors import QueueFull, RefitError, Unavailable
from common.signal import Signal
from rollout_svc.engine import BoundReport, Engine, EngineAdapter, EngineDead


@dataclass(slots=True)
class Slots:
    """At most `count` adapters at a time, and one fewer for requests: a load by the engine into a
    full set would evict an adapter that a request decodes with (vllm#47724).

        async with slots.held(adapter, wait_seconds=5):
            ...  # it is loaded and stays so

    The adapter that nobody has used for the longest makes room; its staged directory brings it
    back.
    """

    engine: Engine
    count: int
    changed: Signal
    _loaded: dict[int, EngineAdapter] = field(default_factory=dict)
    """By id, the one used last at the end."""

    _pins: Counter[int] = field(default_factory=Counter)
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def used(self) -> int:
        return len(self._loaded)

    @property
    def pinned(self) -> int:
        """Slots whose adapter a running request uses."""
        return sum(map(self.is_pinned, self._loaded))

    def is_pinned(self, adapter_id: int) -> bool:
        return self._pins[adapter_id] > 0

    def holds(self, adapter_id: int) -> bool:
        return adapter_id in self._loaded

    @asynccontextmanager
    async def held(self, adapter: EngineAdapter, *, wait_seconds: float) -> AsyncIterator[None]:
        """Keep the adapter in a slot inside the block; it is loaded where it is not.

        Raises:
            QueueFull: running requests had all slots for so long.
            Unavailable: its staged directory could not be loaded again.
        """
        self._pins[adapter.id] += 1
        try:
            if adapter.id in self._loaded:
                self._loaded[adapter.id] = self._loaded.pop(adapter.id)
            else:
                await self._bring(adapter, wait_seconds)
            yield
        finally:
            self._pins[adapter.id] -= 1
            if not self._pins[adapter.id]:
                del self._pins[adapter.id]
            self.changed.notify()

    async def _bring(self, adapter: EngineAdapter, wait_seconds: float) -> None:
        reports = await self._load(adapter, self.count - 1, wait_seconds)
        if reports is None:
            raise QueueFull(
                f"max_loras: running requests used all {self.count - 1} slots for "
                f"{wait_seconds:g} s; send this one later or to another replica, or add slots"
            )
        if errors := [report.error for report in reports if report.error]:
            await self.drop(adapter.id)
            raise Unavailable(f"adapter {adapter.name}: could not be loaded again: {errors[0]}")

    async def load_next(self, adapter: EngineAdapter, *, wait_seconds: float) -> list[BoundReport]:
        """Load a new version, which may take the slot that requests leave free.

        Raises:
            Unavailable: no slot came free in time, or the engine is gone.
        """
        reports = await self._load(adapter, self.count, wait_seconds)
        if reports is None:
            raise Unavailable(
                f"max_loras: all {self.count} slots are in use by running requests; "
                "add slots or shorten the generations"
            )
        return reports

    async def _load(
        self, adapter: EngineAdapter, limit: int, wait_seconds: float
    ) -> list[BoundReport] | None:
        """None: there was no room in time; nothing to report: another request has loaded it."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_seconds
        while adapter.id not in self._loaded:
            if not await self.changed.wait_until(
                lambda: adapter.id in self._loaded or self._has_room(limit),
                timeout_seconds=deadline - loop.time(),
            ):
                return None
            async with self._changing:
                if adapter.id not in self._loaded and self._has_room(limit):
                    return await self._change_places(adapter, limit)
        return []

    def _has_room(self, limit: int) -> bool:
        return self.pinned < limit

    async def _change_places(self, adapter: EngineAdapter, limit: int) -> list[BoundReport]:
        for adapter_id in [i for i in self._loaded if not self.is_pinned(i)]:
            if len(self._loaded) < limit:
                break
            await self._unload(adapter_id)
        self._loaded[adapter.id] = adapter
        try:
            return await self.engine.load(adapter)
        except BaseException:
            # Cancelled, too: the engine may still come to it. A dead engine's error must not take
            # the place of the first one.
            with suppress(RefitError):
                await self._unload(adapter.id)
            raise

    async def overwrite(self, adapter: EngineAdapter) -> list[BoundReport]:
        """Put other bytes into the slot of an id that is loaded, while generation is paused."""
        async with self._changing:
            self._loaded[adapter.id] = adapter
            return await self.engine.load(adapter, in_place=True)

    async def drop(self, adapter_id: int) -> None:
        """Free the slot; without effect when the adapter is in none."""
        async with self._changing:
            if adapter_id in self._loaded:
                await self._unload(adapter_id)

    async def _unload(self, adapter_id: int) -> None:
        """A slot counts as used until the engine has answered; a dead one has none."""
        try:
            with suppress(EngineDead):
                await self.engine.unload(adapter_id)
        finally:
            self._loaded.pop(adapter_id, None)
            self.changed.notify()

    def forget(self) -> None:
        """The engine began anew: nothing is loaded."""
        self._loaded.clear()
        self.changed.notify()
