"""The engine's own weights: the base's, or those of one merged version in their place."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.adapter import AdapterRef, Kind
from common.errors import Incompatible, RefitError, Unavailable
from common.model_dir import BaseModel
from common.signal import Signal
from common.stream.content import Content
from rollout_svc.binding import refuse_unbound
from rollout_svc.canary import check_canary
from rollout_svc.engine import BoundReport, Engine, EngineDead

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Committed:
    """What each rank bound; nothing when the version was served already, or is an alias."""

    reports: list[BoundReport]
    canary_difference: float | None = None


@dataclass(slots=True)
class EngineWeights:
    """What the engine computes with beside adapters, and the door that each request passes.

    Weights are replaced only while nobody uses them: swap rule `finish`.

    Args:
        base: what adapters here belong to; the fingerprint is empty until the base was sent.
        missing: the engine started on random weights and waits for the base's.
    """

    engine: Engine
    base: BaseModel
    missing: bool = False
    merged_from: str = ""
    """The trainer whose merged versions took the base's place."""

    changed: Signal = field(default_factory=Signal)
    _merged_path: Path | None = None
    """Staged weights of the merged version; None where the engine's own files are loaded."""

    _users: int = 0
    _closed: bool = False
    _broken: bool = False

    @property
    def open(self) -> bool:
        """Whether a request may pass now."""
        return not (self._closed or self._broken)

    def check_whole(self) -> None:
        """Raises `EngineDead` once neither new weights nor the ones before could be loaded."""
        if self._broken:
            raise EngineDead("the engine's weights are incomplete; restart this replica")

    def check_base(self) -> None:
        """Raises `Incompatible` where the base cannot answer, as its weights are not here."""
        if self.merged_from:
            raise Incompatible(
                "adapter.rule: VERSION_RULE_BASE, but the base is no longer here: merged weights "
                "took its place; ask for their adapter and version, or another replica"
            )
        if self.missing:
            raise Incompatible(
                "adapter.rule: VERSION_RULE_BASE, but this replica started without weights and "
                "the base's have not come yet; ask again later"
            )

    def check_fits(
        self, kind: Kind, fingerprint: str, *, source: str, adapters: Collection[AdapterRef]
    ) -> None:
        """Raises `Incompatible` where a version cannot be loaded beside what is here.

        Args:
            fingerprint: of the base that the version belongs to.
            adapters: what is served from LoRA slots.
        """
        if self.base.fingerprint not in ("", fingerprint):
            raise Incompatible(
                f"manifest.base_fingerprint: {fingerprint[:12]}, this replica serves "
                f"{self.base.fingerprint[:12]}; start both on the same base model"
            )
        if problem := self._misfit(kind, source, adapters):
            raise Incompatible(f"manifest.kind: {kind.name}, but {problem}")

    def _misfit(self, kind: Kind, source: str, adapters: Collection[AdapterRef]) -> str:
        if kind is Kind.BASE:
            return "" if self.missing else "this replica has its base's weights; send none"
        if kind is Kind.LORA and self.merged_from:
            return (
                f"merged weights from {self.merged_from} took the base's place, and an adapter on "
                "top of them would count twice; restart this replica"
            )
        if kind is Kind.LORA and self.missing:
            return "this replica started without weights; send ADAPTER_KIND_BASE first"
        if kind is Kind.MERGED and adapters:
            return (
                f"{', '.join(map(str, adapters))} is served on the base that merged weights would "
                "replace; use another replica for them"
            )
        if kind is Kind.MERGED and self.merged_from not in ("", source):
            return f"this replica serves merged weights from {self.merged_from} and can hold one"
        return ""

    @contextmanager
    def used(self) -> Iterator[None]:
        """The weights stay what they are inside the block."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self.changed.notify()

    @asynccontextmanager
    async def unused(self, *, wait_seconds: float) -> AsyncIterator[None]:
        """Nobody uses the weights inside the block; new requests wait until it ends.

        Raises:
            Unavailable: those that run have not ended in time.
        """
        self._closed = True
        try:
            if not await self.changed.wait_until(
                lambda: not self._users, timeout_seconds=wait_seconds
            ):
                raise Unavailable(
                    f"slot_wait_seconds: {self._users} requests still ran on the old weights after "
                    f"{wait_seconds:g} s; raise it or shorten the generations"
                )
            yield
        finally:
            self._closed = False
            self.changed.notify()

    async def load(self, content: Content, path: Path, *, source: str) -> Committed:
        """Load the staged weights of `path`; on an error those from before are loaded again.

        Call it inside `unused`, and see it through.

        Raises:
            Incompatible: a tensor found no parameter, or a parameter no tensor.
            CanaryRefused: the log-probabilities are not the trainer's.
            Unavailable: the engine did not answer.
        """
        ref = content.ref
        bound = await self.engine.check_weights(path)
        refuse_unbound(ref, bound)
        try:
            refuse_unbound(ref, await self.engine.load_weights(path))
            difference = None
            if content.canary:
                difference = await check_canary(self.engine, None, content.canary, ref=ref)
        except BaseException:
            await self._restore()
            raise
        self.missing = False
        self.base = replace(self.base, fingerprint=content.manifest.base_fingerprint)
        if content.manifest.kind is Kind.MERGED:
            self.merged_from, self._merged_path = source, path
        return Committed(bound, difference)

    async def _restore(self) -> None:
        if self.missing:
            return  # what was there before were random weights, which nobody was given
        try:
            reports = await self.engine.load_weights(self._merged_path)
            errors = [report.error for report in reports if report.error]
        except RefitError as error:
            errors = [str(error)]
        if errors:
            self._broken = True
            log.error("the weights from before could not be loaded again: %s", errors[0])
