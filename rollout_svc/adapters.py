"""The versions a replica serves: committed in one step, pinned while used, retired when old."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from common.adapter import AdapterRef
from common.errors import (
    AdapterNotFound,
    AlreadyExists,
    Incompatible,
    RefitError,
    Unavailable,
    WaitExpired,
)
from rollout_svc.engine import BoundReport, Engine, EngineAdapter
from rollout_svc.selector import Rule, Selector

_NAMED_TENSORS = 3


@dataclass(slots=True, eq=False)
class LiveAdapter:
    """A loaded version. Once `retired` no new request finds it; it goes with its last pin.

    A `superseded` one answers until its adapter has another version.
    """

    ref: AdapterRef
    loaded: EngineAdapter
    pins: int = 0
    retired: bool = False
    superseded: bool = False


@dataclass(slots=True)
class AdapterRegistry:
    """Which version answers a request.

        await registry.commit(ref, path)
        async with registry.admit(selector, wait_seconds=30) as live:
            ...  # live.loaded stays loaded here, whatever arrives meanwhile

    `run` unloads what is no longer needed and must be running.

    Args:
        slots: LoRA slots of the engine. At most this many minus one are loaded between commits,
            so that a load never evicts an adapter (vllm#47724).
        keep_versions: newest versions of an adapter that stay committed.
    """

    engine: Engine
    slots: int
    keep_versions: int
    slot_wait_seconds: float
    first_commit: asyncio.Event = field(default_factory=asyncio.Event)
    _live: list[LiveAdapter] = field(default_factory=list)
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _commit_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def listing(self) -> list[AdapterRef]:
        """Versions a request may ask for, oldest commit first."""
        return [live.ref for live in self._live if not live.retired]

    async def commit(self, ref: AdapterRef, path: Path) -> list[BoundReport]:
        """Load the PEFT directory `path` and serve it; the directory is the registry's from here.

        Returns what each rank bound; empty when this very version is served already. A failed
        commit changes no listing and removes `path`.

        Raises:
            AlreadyExists: the version is known with another digest.
            Incompatible: a tensor found no module, or the engine refused the adapter.
            Unavailable: no slot came free in time, or the engine is gone.
        """
        try:
            async with self._commit_lock:
                return await self._commit(ref, path)
        except BaseException:
            await asyncio.to_thread(_remove, path)
            raise

    async def _commit(self, ref: AdapterRef, path: Path) -> list[BoundReport]:
        if served := self._served(ref):
            served.superseded = False
            await asyncio.to_thread(_remove, path)
            return []
        await self._wait(self._has_free_slot, self.slot_wait_seconds, self._slots_are_taken)
        name = f"{ref.adapter}@{ref.version}-{ref.digest.hex()[:16]}"
        loaded = EngineAdapter(next(self._ids), name, path)
        try:
            reports = await self.engine.load(loaded)
            _refuse_unbound(ref, reports)
        except BaseException:
            # A dead engine's error must not take the place of a cancellation that is under way.
            with contextlib.suppress(RefitError):
                await self.engine.unload(loaded.id)
            raise
        self._live.append(LiveAdapter(ref, loaded))
        self._retain(ref)
        self.first_commit.set()
        await self._notify()
        return reports

    def _served(self, ref: AdapterRef) -> LiveAdapter | None:
        for live in self._live:
            known = live.ref
            if _same_version(known, ref) and known.digest != ref.digest:
                raise AlreadyExists(
                    f"ref: {ref} is served with digest {known.digest.hex()[:12]}; "
                    "publish other bytes as a new version"
                )
            if known == ref and not live.retired:
                return live
        return None

    def _retain(self, newest: AdapterRef) -> None:
        """Retire the superseded and what is above a limit, of versions or slots; never `newest`."""
        for live in self._versions(newest.adapter):
            live.retired = live.superseded
        for live in self._versions(newest.adapter)[: -self.keep_versions]:
            live.retired = True
        by_worth = sorted(self._current(), key=lambda live: not live.superseded)
        for live in by_worth[: -(self.slots - 1)]:
            live.retired = True

    def _current(self) -> list[LiveAdapter]:
        return [live for live in self._live if not live.retired]

    def _versions(self, adapter: str) -> list[LiveAdapter]:
        return [live for live in self._current() if live.ref.adapter == adapter]

    async def retire(self, ref: AdapterRef) -> None:
        """No new request may ask for `ref` from here on; without effect when it is unknown.

        The last version of an adapter goes only when another is committed: the one that was to
        replace it may be refused, and the replica would answer nobody.
        """
        for live in self._current():
            if live.ref == ref:
                live.superseded = True
                live.retired = len(self._versions(ref.adapter)) > 1
        await self._notify()

    @asynccontextmanager
    async def admit(
        self, selector: Selector, *, wait_seconds: float
    ) -> AsyncIterator[LiveAdapter | None]:
        """Choose the version and keep it loaded inside the block; None is the base model.

        Raises:
            AdapterNotFound: no such adapter, or not that version.
            WaitExpired: AT_LEAST did not see its version within `wait_seconds`.
        """
        if selector.rule is Rule.BASE:
            yield None
            return
        if selector.rule is Rule.AT_LEAST:
            await self._wait(
                lambda: selector.pick(self.listing()) is not None,
                wait_seconds,
                lambda: WaitExpired(f"adapter: {selector} did not arrive; {self._what_is_here()}"),
            )
        live = self._find(selector)
        live.pins += 1
        try:
            yield live
        finally:
            live.pins -= 1
            self._idle.set()

    def _find(self, selector: Selector) -> LiveAdapter:
        ref = selector.pick(self.listing())
        if ref is None:
            raise AdapterNotFound(f"adapter: {selector} is not served; {self._what_is_here()}")
        return next(live for live in self._live if live.ref == ref and not live.retired)

    async def run(self) -> None:
        """Unload retired versions as their last pins go; until cancelled."""
        while True:
            await self._idle.wait()
            self._idle.clear()
            for live in [live for live in self._live if live.retired and not live.pins]:
                await self.engine.unload(live.loaded.id)
                await asyncio.to_thread(_remove, live.loaded.path)
                self._live.remove(live)
                await self._notify()

    async def _wait(
        self, ready: Callable[[], bool], seconds: float, expired: Callable[[], Exception]
    ) -> None:
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(ready)
        except TimeoutError as error:
            raise expired() from error

    async def _notify(self) -> None:
        self._idle.set()
        async with self._changed:
            self._changed.notify_all()

    def _has_free_slot(self) -> bool:
        return len(self._live) < self.slots

    def _slots_are_taken(self) -> Unavailable:
        return Unavailable(
            f"max_loras: all {self.slots} slots are in use by running requests; "
            "add slots or shorten the generations"
        )

    def _what_is_here(self) -> str:
        return "served here: " + (", ".join(map(str, self.listing())) or "nothing but the base")


def _same_version(one: AdapterRef, other: AdapterRef) -> bool:
    return (one.run_id, one.adapter, one.version) == (other.run_id, other.adapter, other.version)


def _refuse_unbound(ref: AdapterRef, reports: list[BoundReport]) -> None:
    """A tensor counts as bound when every rank of one pipeline stage has taken it."""
    if errors := [report.error for report in reports if report.error]:
        raise Incompatible(f"adapter {ref}: the engine refused it: {errors[0]}")
    stages: dict[int, set[str]] = {}
    for report in reports:
        stages.setdefault(report.stage, set()).update(report.unbound)
    unbound = sorted(set.intersection(*stages.values()))
    if unbound:
        more = f" and {len(unbound) - _NAMED_TENSORS} more" if len(unbound) > _NAMED_TENSORS else ""
        raise Incompatible(
            f"adapter {ref}: {len(unbound)} tensors found no module: "
            f"{', '.join(unbound[:_NAMED_TENSORS])}{more}; train it on this replica's base model"
        )


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
