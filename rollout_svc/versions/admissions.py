"""How a request gets its version, and keeps it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from common.errors import AdapterNotFound, WaitExpired
from rollout_svc.versions.live import Admitted, LiveAdapter
from rollout_svc.versions.live_versions import LiveVersions
from rollout_svc.versions.selector import Rule, Selector
from rollout_svc.versions.slots import Slots
from rollout_svc.versions.uses import Uses
from rollout_svc.versions.weights import EngineWeights


@dataclass(frozen=True, slots=True)
class Admissions:
    """Of the registry.

    Args:
        slot_wait_seconds: how long a request waits for a slot at most.
        left: called when a request has ended.
    """

    versions: LiveVersions
    uses: Uses
    slots: Slots
    weights: EngineWeights
    slot_wait_seconds: float
    left: Callable[[], None]

    @asynccontextmanager
    async def admit(
        self, selector: Selector, *, request_id: str, wait_seconds: float
    ) -> AsyncIterator[Admitted]:
        """Choose the version and keep it loaded inside the block.

        Args:
            request_id: as the engine will know it; no other running request's.

        Raises:
            AdapterNotFound: no such adapter, or not that version.
            Incompatible: the base is asked for, and its weights are not here.
            WaitExpired: AT_LEAST did not see its version within `wait_seconds`, or the weights
                were being replaced for so long.
            QueueFull: running requests had all slots for so long, or for `slot_wait_seconds`.
            Unavailable: the engine is being started anew, or sleeps.
        """
        if not await self.uses.changed.wait_until(
            lambda: self.uses.refuses or (self._is_open() and self._has_arrived(selector)),
            timeout_seconds=wait_seconds,
        ):
            raise WaitExpired(f"adapter: {selector} did not arrive; {self._what_is_here()}")
        self.uses.check_taken()
        live = self._chosen(selector)
        try:
            with self.uses.using(request_id, live) as use:
                if live is None or live.merged:
                    yield Admitted(use)
                    return
                wait_seconds = min(wait_seconds, self.slot_wait_seconds)
                async with self.slots.held(live.loaded, wait_seconds=wait_seconds):
                    yield Admitted(use)
        finally:
            self.left()

    def _is_open(self) -> bool:
        return self.uses.open and not self.weights.broken

    def _has_arrived(self, selector: Selector) -> bool:
        return selector.rule is not Rule.AT_LEAST or self.versions.find(selector) is not None

    def _chosen(self, selector: Selector) -> LiveAdapter | None:
        if selector.rule is Rule.BASE:
            self.weights.check_base()
            return None
        live = self.versions.find(selector)
        if live is None:
            raise AdapterNotFound(f"adapter: {selector} is not served; {self._what_is_here()}")
        return live

    def _what_is_here(self) -> str:
        return "served here: " + (
            ", ".join(map(str, self.versions.refs())) or "nothing but the base"
        )
