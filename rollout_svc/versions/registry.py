"""The versions a replica serves: committed in one step, pinned while used, retired when old."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import InitVar, dataclass, field
from pathlib import Path

from common.adapter import AdapterRef, Kind
from common.errors import (
    Incompatible,
    NotHeld,
    Unavailable,
)
from common.model_dir import BaseModel
from common.rules import Merge, Rules, Swap
from common.stream.content import Content
from rollout_svc.engine import Engine
from rollout_svc.life.pauses import EnginePause
from rollout_svc.versions.admissions import Admissions
from rollout_svc.versions.commits import Commits, Committed
from rollout_svc.versions.live import Admitted, LiveAdapter
from rollout_svc.versions.live_versions import LiveVersions
from rollout_svc.versions.pristine import PristineBase
from rollout_svc.versions.retention import Retention
from rollout_svc.versions.selector import Selector
from rollout_svc.versions.slots import Slots
from rollout_svc.versions.uses import Uses, everybody
from rollout_svc.versions.weights import EngineWeights


@dataclass(slots=True)
class AdapterRegistry:
    """Which version answers a request.

        await registry.commit(content, path, source="trainer:50051")
        async with registry.admit(selector, request_id="1", wait_seconds=30) as admitted:
            ...  # admitted.adapter stays loaded here, whatever arrives meanwhile

    `run` unloads what is no longer needed and must be running.

    Args:
        base: the model that adapters here belong to.
        pristine: where its weights are read from; without a model in it they are not here yet.
        slots: LoRA slots of the engine. At most this many minus one take part in a batch, so that
            the load of the next version never evicts an adapter (vllm#47724).
        keep_versions: newest versions of an adapter that stay committed.
        slot_wait_seconds: how long a commit waits for running requests, and a request for a slot.
        rules: for updates that come without.
        pause: the engine's, shared with whoever else pauses it.
    """

    engine: Engine
    base: InitVar[BaseModel]
    pristine: InitVar[PristineBase]
    slots: InitVar[int]
    keep_versions: InitVar[int]
    slot_wait_seconds: float
    rules: Rules = field(default_factory=lambda: Rules(Swap.FINISH, Merge.NEVER))
    pause: InitVar[EnginePause | None] = None
    first_commit: asyncio.Event = field(default_factory=asyncio.Event)
    weights: EngineWeights = field(init=False)
    lora_slots: Slots = field(init=False)
    uses: Uses = field(init=False)
    versions: LiveVersions = field(init=False)
    _admissions: Admissions = field(init=False)
    _commits: Commits = field(init=False)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _commit_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(
        self,
        base: BaseModel,
        pristine: PristineBase,
        slots: int,
        keep_versions: int,
        pause: EnginePause | None,
    ) -> None:
        engine = self.engine
        self.uses = Uses(engine.abort)
        self.weights = EngineWeights(engine, base, pristine, missing=pristine.missing)
        self.lora_slots = Slots(engine, slots, self.uses.changed)
        self.versions = LiveVersions(Retention(slots=slots, keep_versions=keep_versions))
        self._admissions = Admissions(
            versions=self.versions,
            uses=self.uses,
            slots=self.lora_slots,
            weights=self.weights,
            slot_wait_seconds=self.slot_wait_seconds,
            left=self._idle.set,
        )
        self._commits = Commits(
            engine=engine,
            lives=self.versions.all,
            serve=self._serve,
            uses=self.uses,
            slots=self.lora_slots,
            weights=self.weights,
            pause=pause or EnginePause(engine),
            wait_seconds=self.slot_wait_seconds,
        )

    def listing(self, *, source: str | None = None) -> list[AdapterRef]:
        """Versions a request may ask for, oldest commit first; of one trainer, or of all."""
        return self.versions.refs(source=source)

    def contents(self) -> list[Content]:
        """The bytes of the versions served, oldest commit first."""
        return self.versions.contents()

    def is_merged(self, kind: Kind, rules: Rules) -> bool:
        """Whether such an update takes the place of the engine's own weights."""
        return kind is not Kind.LORA or (rules.merge or self.rules.merge) is Merge.ROLLOUT

    def check_fits(
        self, ref: AdapterRef, kind: Kind, base_fingerprint: str, *, rules: Rules, source: str
    ) -> None:
        """Raises `Incompatible` where such a version cannot be served beside what is here."""
        current = self.versions.current()
        others = [live.ref for live in current if not _may_replace(ref, source, live)]
        self.weights.check_fits(
            kind, base_fingerprint, merged=self.is_merged(kind, rules), others=others
        )

    async def commit(self, content: Content, path: Path, *, source: str) -> Committed:
        """Load the staged directory `path` and serve it; it is the registry's from here.

        What becomes of running requests, and where the version is served, say the update's rules
        or this replica's own. The base's own weights are loaded, and not listed.

        A failed commit changes no listing and removes `path`.

        Raises:
            AlreadyExists: the version is known with another digest.
            Incompatible: a tensor found no module, the engine refused the version, or it does not
                go with what is served here.
            CanaryRefused: its log-probabilities are not the trainer's.
            Unavailable: running requests did not make way in time, or the engine is gone or asleep.
        """
        try:
            async with self._turn():
                return await self._commit(content, path, source)
        except BaseException:
            used = self.weights.uses(path) or any(
                live.loaded.path == path for live in self.versions.all
            )
            if not used:
                await asyncio.to_thread(_remove, path)
            raise

    async def _commit(self, content: Content, path: Path, source: str) -> Committed:
        ref, kind = content.ref, content.manifest.kind
        if self.versions.serve_again(ref):
            await asyncio.to_thread(_remove, path)
            return Committed([])
        fingerprint = content.manifest.base_fingerprint
        self.check_fits(ref, kind, fingerprint, rules=content.rules, source=source)
        merged = self.is_merged(kind, content.rules)
        load = self._commits.into_weights if merged else self._commits.into_slot
        swap = content.rules.swap or self.rules.swap or Swap.FINISH
        return await load(content, path, source=source, swap=swap)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One commit at a time; raises `Unavailable` where the wait for the turn is too long."""
        try:
            async with asyncio.timeout(self.slot_wait_seconds):
                await self._commit_lock.acquire()
        except TimeoutError as error:
            raise Unavailable(
                f"slot_wait_seconds: for {self.slot_wait_seconds:g} s the engine slept, was "
                "started anew or took another update; this one comes again once it serves"
            ) from error
        try:
            yield
        finally:
            self._commit_lock.release()

    async def alias(self, ref: AdapterRef, *, source: str) -> None:
        """Serve `ref` by the version that has the same digest; nothing is loaded.

        Raises:
            AlreadyExists: the version is known with another digest.
            NotHeld: no version here has these bytes.
        """
        async with self._turn():
            if self.versions.serve_again(ref):
                return
            twin = self.versions.twin(ref.digest)
            if twin is None:
                raise NotHeld(f"alias.ref: no version here has the digest of {ref}")
            if twin.merged and not _may_replace(ref, source, twin):
                raise Incompatible(
                    f"alias.ref: {ref}, but {twin.ref} is served as merged weights, alone; use "
                    "another replica"
                )
            content = Content.whole(ref, twin.content.manifest, twin.content.buffer)
            alias = LiveAdapter(content, twin.loaded, source, merged=twin.merged)
            self._serve(alias)
            if self.rules.swap is Swap.ABORT:
                await self._commits.end_replaced(alias)

    def _serve(self, live: LiveAdapter) -> None:
        self.versions.serve(live)
        self.first_commit.set()
        self._notify()

    def retire(self, ref: AdapterRef, *, source: str) -> None:
        """No new request may ask for `ref` from here on; without effect on another trainer's.

        The last version of an adapter goes only when another is committed, or a version of the
        trainer's next run: what was to replace it may be refused, and the replica would answer
        nobody.
        """
        self.versions.retire(ref, source=source)
        self._notify()

    def admit(
        self, selector: Selector, *, request_id: str, wait_seconds: float
    ) -> AbstractAsyncContextManager[Admitted]:
        """See `Admissions.admit`."""
        return self._admissions.admit(selector, request_id=request_id, wait_seconds=wait_seconds)

    async def run(self) -> None:
        """Unload retired versions as their last pins go; until cancelled."""
        while True:
            await self._idle.wait()
            self._idle.clear()
            # A call of its own: a variable here would keep the last one's bytes.
            await self._unload_unused()

    async def _unload_unused(self) -> None:
        for live in self.versions.unused():
            others = self.versions.others(live)
            if all(other.loaded.id != live.loaded.id for other in others):
                await self.lora_slots.drop(live.loaded.id)
            if all(other.loaded.path != live.loaded.path for other in others):
                await asyncio.to_thread(_remove, live.loaded.path)
            self.versions.all.remove(live)
            self.uses.changed.notify()

    @asynccontextmanager
    async def stopped(
        self, *, grace_seconds: float, because: str, is_dead: bool = False
    ) -> AsyncIterator[None]:
        """Nobody computes inside the block, and nothing is committed.

        Requests that run longer than the grace end with the tokens they have; new ones are refused,
        from the call on.

        Args:
            is_dead: the engine is; those who have not noticed by the end of the grace are not
                waited for.

        Raises:
            Unavailable: they did not even then.
        """

        with self.uses.closed(because=because):
            async with self._commit_lock:
                try:
                    await self.uses.wait_for_end(everybody, wait_seconds=grace_seconds)
                except Unavailable:
                    if not is_dead:
                        await self.uses.end(everybody, wait_seconds=self.slot_wait_seconds)
                yield

    async def reload(self) -> None:
        """Put back what was served, after the engine began anew; call it inside `stopped`.

        Every adapter's newest version is in a slot then, as far as there are any; the others come
        when they are asked for.

        Raises:
            Incompatible, Unavailable: something could not be loaded again.
        """
        self.lora_slots.forget()
        await self.weights.reload(next((v.ref for v in self.versions.all if v.merged), None))
        newest = {(v.source, v.ref.adapter): v for v in self.versions.current() if v.lora}
        for live in list(newest.values())[: max(self.lora_slots.count - 1, 0)]:
            async with self.lora_slots.held(live.loaded, wait_seconds=self.slot_wait_seconds):
                pass

    def _notify(self) -> None:
        self._idle.set()
        self.uses.changed.notify()


def _may_replace(ref: AdapterRef, source: str, live: LiveAdapter) -> bool:
    """Whether `live` goes when this version of a trainer comes."""
    of_older_run = live.ref.run_id != ref.run_id
    return live.source == source and (live.ref.adapter == ref.adapter or of_older_run)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
