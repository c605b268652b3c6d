"""The versions a replica serves: committed in one step, pinned while used, retired when old."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import InitVar, dataclass, field
from pathlib import Path

from common.adapter import AdapterRef, Kind
from common.errors import (
    AdapterNotFound,
    AlreadyExists,
    NotHeld,
    RefitError,
    Unavailable,
    WaitExpired,
)
from common.model_dir import BaseModel
from common.signal import Signal
from common.stream.content import Content
from common.tasks import see_through
from rollout_svc.binding import refuse_unbound
from rollout_svc.canary import check_canary
from rollout_svc.engine import Engine, EngineAdapter
from rollout_svc.retention import LiveAdapter, Retention, current, slots_used
from rollout_svc.selector import Rule, Selector
from rollout_svc.weights import Committed, EngineWeights


@dataclass(slots=True)
class AdapterRegistry:
    """Which version answers a request.

        await registry.commit(content, path, source="trainer:50051")
        async with registry.admit(selector, wait_seconds=30) as live:
            ...  # live.loaded stays loaded here, whatever arrives meanwhile

    `run` unloads what is no longer needed and must be running.

    Args:
        base: the model that adapters here belong to.
        base_missing: its weights are not here yet.
        slots: LoRA slots of the engine. At most this many minus one are loaded between commits,
            so that a load never evicts an adapter (vllm#47724).
        keep_versions: newest versions of an adapter that stay committed.
    """

    engine: Engine
    base: InitVar[BaseModel]
    slots: int
    keep_versions: int
    slot_wait_seconds: float
    base_missing: InitVar[bool] = False
    first_commit: asyncio.Event = field(default_factory=asyncio.Event)
    _live: list[LiveAdapter] = field(default_factory=list)
    _unloading: set[int] = field(default_factory=set)
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    weights: EngineWeights = field(init=False)
    _changed: Signal = field(init=False)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _commit_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _retention: Retention = field(init=False)

    def __post_init__(self, base: BaseModel, base_missing: bool) -> None:
        self.weights = EngineWeights(self.engine, base, missing=base_missing)
        self._changed = self.weights.changed
        self._retention = Retention(slots=self.slots, keep_versions=self.keep_versions)

    def listing(self, *, source: str | None = None) -> list[AdapterRef]:
        """Versions a request may ask for, oldest commit first; of one trainer, or of all."""
        return [live.ref for live in current(self._live) if source in (None, live.source)]

    def contents(self) -> list[Content]:
        """The bytes of the versions served, oldest commit first."""
        return [live.content for live in current(self._live)]

    def check_fits(self, kind: Kind, base_fingerprint: str, *, source: str) -> None:
        """Raises `Incompatible` where such a version cannot be served beside what is here."""
        adapters = [live.ref for live in current(self._live) if live.lora]
        self.weights.check_fits(kind, base_fingerprint, source=source, adapters=adapters)

    async def commit(self, content: Content, path: Path, *, source: str) -> Committed:
        """Load the staged directory `path` and serve it; it is the registry's from here.

        A merged version waits for every running request to end, and takes the place of the one
        before it. The base's own weights are loaded, and not listed.

        A failed commit changes no listing and removes `path`.

        Raises:
            AlreadyExists: the version is known with another digest.
            Incompatible: a tensor found no module, the engine refused the version, or it does not
                go with what is served here.
            CanaryRefused: its log-probabilities are not the trainer's.
            Unavailable: no slot came free in time, or the engine is gone.
        """
        try:
            async with self._commit_lock:
                return await self._commit(content, path, source)
        except BaseException:
            if all(live.loaded.path != path for live in self._live):
                await asyncio.to_thread(_remove, path)
            raise

    async def _commit(self, content: Content, path: Path, source: str) -> Committed:
        ref = content.ref
        if served := self._served(ref):
            served.superseded = False
            await asyncio.to_thread(_remove, path)
            return Committed([])
        self.check_fits(content.manifest.kind, content.manifest.base_fingerprint, source=source)
        if content.manifest.kind is not Kind.LORA:
            async with self.weights.unused(wait_seconds=self.slot_wait_seconds):
                return await see_through(self._replace_weights(content, path, source))
        return await self._load(content, path, source)

    async def _replace_weights(self, content: Content, path: Path, source: str) -> Committed:
        committed = await self.weights.load(content, path, source=source)
        if content.manifest.kind is Kind.BASE:
            await asyncio.to_thread(_remove, path)
            return committed
        for live in self._live:
            live.retired = True
        self._serve(LiveAdapter(content, self._named(content.ref, path), source))
        return committed

    async def _load(self, content: Content, path: Path, source: str) -> Committed:
        ref = content.ref
        self._retention.check_room(ref, self._live, source=source)
        await self._wait(self._has_free_slot, self.slot_wait_seconds, self._slots_are_taken)
        loaded = self._named(ref, path)
        try:
            reports = await self.engine.load(loaded)
            refuse_unbound(ref, reports)
            difference = None
            if content.canary:
                difference = await check_canary(self.engine, loaded, content.canary, ref=ref)
        except BaseException:
            # A dead engine's error must not take the place of a cancellation that is under way.
            with contextlib.suppress(RefitError):
                await self.engine.unload(loaded.id)
            raise
        self._serve(LiveAdapter(content, loaded, source))
        return Committed(reports, difference)

    def _named(self, ref: AdapterRef, path: Path) -> EngineAdapter:
        name = f"{ref.adapter}@{ref.version}-{ref.digest.hex()[:16]}"
        return EngineAdapter(next(self._ids), name, path)

    async def alias(self, ref: AdapterRef, *, source: str) -> None:
        """Serve `ref` by the version that has the same digest; nothing is loaded.

        Raises:
            AlreadyExists: the version is known with another digest.
            NotHeld: no version here has these bytes.
        """
        async with self._commit_lock:
            if served := self._served(ref):
                served.superseded = False
                return
            twin = next((t for t in current(self._live) if t.ref.digest == ref.digest), None)
            if twin is None:
                raise NotHeld(f"alias.ref: no version here has the digest of {ref}")
            content = Content.whole(ref, twin.content.manifest, twin.content.buffer)
            self._serve(LiveAdapter(content, twin.loaded, source))

    def _serve(self, live: LiveAdapter) -> None:
        """Nothing is awaited: a cancellation comes before the switch or after it."""
        self._live.append(live)
        self._retention.retire_for(live, self._live)
        self.first_commit.set()
        self._notify()

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

    def retire(self, ref: AdapterRef, *, source: str) -> None:
        """No new request may ask for `ref` from here on; without effect on another trainer's.

        The last version of an adapter goes only when another is committed, or a version of the
        trainer's next run: what was to replace it may be refused, and the replica would answer
        nobody.
        """
        for live in current(self._live):
            if (live.ref, live.source) == (ref, source):
                live.superseded = True
                live.retired = any(other.replaces(live) for other in current(self._live))
        self._notify()

    @asynccontextmanager
    async def admit(
        self, selector: Selector, *, wait_seconds: float
    ) -> AsyncIterator[LiveAdapter | None]:
        """Choose the version and keep it loaded inside the block; None is the base model.

        Raises:
            AdapterNotFound: no such adapter, or not that version.
            Incompatible: the base is asked for, and its weights are not here.
            WaitExpired: AT_LEAST did not see its version within `wait_seconds`, or the weights
                were being replaced for so long.
        """
        await self._wait(
            lambda: self.weights.open and self._has_arrived(selector),
            wait_seconds,
            lambda: WaitExpired(f"adapter: {selector} did not arrive; {self._what_is_here()}"),
        )
        with self.weights.used():
            if selector.rule is Rule.BASE:
                self.weights.check_base()
                yield None
                return
            live = self._find(selector)
            live.pins += 1
            try:
                yield live
            finally:
                live.pins -= 1
                self._idle.set()

    def _has_arrived(self, selector: Selector) -> bool:
        return selector.rule is not Rule.AT_LEAST or selector.pick(self.listing()) is not None

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
            # A call of its own: a variable here would keep the last one's bytes.
            await self._unload_unused()

    async def _unload_unused(self) -> None:
        for live in [live for live in self._live if live.retired and not live.pins]:
            self._live.remove(live)
            if all(other.loaded is not live.loaded for other in self._live):
                await self._unload(live)
            self._notify()

    async def _unload(self, live: LiveAdapter) -> None:
        if not live.lora:
            await asyncio.to_thread(_remove, live.loaded.path)
            return
        self._unloading.add(live.lora.id)
        try:
            await self.engine.unload(live.lora.id)
            await asyncio.to_thread(_remove, live.loaded.path)
        finally:
            self._unloading.remove(live.lora.id)

    async def _wait(
        self, ready: Callable[[], bool], seconds: float, expired: Callable[[], Exception]
    ) -> None:
        if not await self._changed.wait_until(ready, timeout_seconds=seconds):
            raise expired()

    def _notify(self) -> None:
        self._idle.set()
        self._changed.notify()

    def _has_free_slot(self) -> bool:
        return slots_used(self._live) + len(self._unloading) < self.slots

    def _slots_are_taken(self) -> Unavailable:
        return Unavailable(
            f"max_loras: all {self.slots} slots are in use by running requests; "
            "add slots or shorten the generations"
        )

    def _what_is_here(self) -> str:
        return "served here: " + (", ".join(map(str, self.listing())) or "nothing but the base")


def _same_version(one: AdapterRef, other: AdapterRef) -> bool:
    return (one.run_id, one.adapter, one.version) == (other.run_id, other.adapter, other.version)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
