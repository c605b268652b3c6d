"""The engine's own weights: the base's, or those of one merged version in their place."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from common.adapter import AdapterRef, Kind
from common.errors import Incompatible, RefitError
from common.model_dir import BaseModel
from common.stream.content import Content
from rollout_svc.engine import BoundReport, Engine, EngineDead
from rollout_svc.versions.binding import refuse_unbound
from rollout_svc.versions.pristine import PristineBase

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the engine computes with beside adapters in slots.

    Args:
        whole: staged weights of a whole model; None: the base's.
        summed: staged adapter that is summed into the base's.
    """

    whole: Path | None = None
    summed: Path | None = None


BASE = Loaded()


@dataclass(slots=True)
class EngineWeights:
    """Replaces the engine's weights, while the caller sees to it that nobody uses them.

    Args:
        base: what adapters here belong to; the fingerprint is empty until the base was sent.
        missing: the engine started on random weights and waits for the base's.
    """

    engine: Engine
    base: BaseModel
    pristine: PristineBase
    missing: bool = False
    merged_from: str = ""
    """The trainer whose merged version took the base's place."""

    loaded: Loaded = BASE
    _base_is_loaded: bool = True
    """Whether what an adapter does not touch is the base's."""

    _broken: bool = False

    def check_whole(self) -> None:
        """Raises `EngineDead` once neither new weights nor the ones before could be loaded."""
        if self._broken:
            raise EngineDead("the engine's weights are incomplete")

    @property
    def broken(self) -> bool:
        return self._broken

    def check_base(self) -> None:
        """Raises `Incompatible` where the base cannot answer, as its weights are not here."""
        if self.merged_from:
            raise Incompatible(
                "adapter.rule: VERSION_RULE_BASE, but the base is not served: merged weights took "
                "its place; ask for their adapter and version, or another replica"
            )
        if self.missing:
            raise Incompatible(
                "adapter.rule: VERSION_RULE_BASE, but this replica started without weights and "
                "the base's have not come yet; ask again later"
            )

    def check_fits(
        self, kind: Kind, fingerprint: str, *, merged: bool, others: list[AdapterRef]
    ) -> None:
        """Raises `Incompatible` where a version cannot be loaded beside what is here.

        Args:
            fingerprint: of the base that the version belongs to.
            merged: it takes the place of the engine's own weights.
            others: what is served here and is no older version of it.
        """
        if self.base.fingerprint not in ("", fingerprint):
            raise Incompatible(
                f"manifest.base_fingerprint: {fingerprint[:12]}, this replica serves "
                f"{self.base.fingerprint[:12]}; start both on the same base model"
            )
        if problem := self._misfit(kind, merged, ", ".join(map(str, others))):
            raise Incompatible(f"manifest.kind: {kind.name}, but {problem}")

    def _misfit(self, kind: Kind, merged: bool, others: str) -> str:
        if kind is Kind.BASE:
            return "" if self.missing else "this replica has its base's weights; send none"
        if kind is Kind.LORA and self.missing:
            return "this replica started without weights; send ADAPTER_KIND_BASE first"
        if merged and others:
            return f"{others} is served, and merged weights would replace it; use another replica"
        if self.merged_from and others:
            return f"{others} is served as merged weights, alone; use another replica"
        if kind is Kind.LORA and self.merged_from and self.pristine.missing:
            return (
                f"merged weights from {self.merged_from} took the base's place, which is not here; "
                "send ADAPTER_KIND_BASE to a new replica"
            )
        return ""

    async def check(self, content: Content, path: Path) -> list[BoundReport]:
        """Find a place for every tensor of what is to be merged or loaded whole.

        Raises:
            Incompatible: a tensor found no parameter, or a parameter no tensor.
        """
        if content.manifest.kind is Kind.LORA:
            base = await self.pristine.directory()
            reports = await self.engine.check_merge(path, base=base)
        else:
            reports = await self.engine.check_weights(path)
        refuse_unbound(content.ref, reports)
        return reports

    async def put(self, wanted: Loaded, ref: AdapterRef) -> list[BoundReport]:
        """Load what is wanted; on an error what was there before is loaded again.

        Nothing may be generated meanwhile; see it through.

        Raises:
            Incompatible: a rank refused it.
            Unavailable: the engine did not answer.
        """
        before = self.loaded
        try:
            reports = await self._load(wanted)
            refuse_unbound(ref, reports)
        except BaseException:
            await self.put_back(before)
            raise
        self.loaded = wanted
        return reports

    async def put_back(self, before: Loaded) -> None:
        """Load what was there before something that is not to stay."""
        if self.missing:
            return  # random weights, which nobody was given
        try:
            reports = await self._load(before)
            errors = [report.error for report in reports if report.error]
        except RefitError as error:
            errors = [str(error)]
        self.loaded = before
        if errors:
            self.give_up(before, errors[0])

    def give_up(self, before: Loaded, reason: str) -> None:
        """Nobody knows what the engine computes with: it is to begin anew, with what was there."""
        self.loaded, self._broken = before, True
        log.error("the weights from before could not be loaded again: %s", reason)

    def uses(self, path: Path) -> bool:
        """Whether a staged directory is what the engine's weights come from."""
        return path in (self.loaded.whole, self.loaded.summed) or self.pristine.is_at(path)

    async def _load(self, wanted: Loaded) -> list[BoundReport]:
        if wanted.whole:
            self._base_is_loaded = False
            return await self.engine.load_weights(wanted.whole)
        base = await self.pristine.directory()
        if not self._base_is_loaded:
            reports = await self.engine.load_weights(base)
            if wanted == BASE or any(report.error for report in reports):
                self._base_is_loaded = not any(report.error for report in reports)
                return reports
            self._base_is_loaded = True
        return await self.engine.merge(wanted.summed, base=base)

    def settle(self, content: Content, *, source: str) -> None:
        """What was put there stays: the base, or a merged version of `source`."""
        self.missing = False
        self.base = replace(self.base, fingerprint=content.manifest.base_fingerprint)
        if content.manifest.kind is Kind.BASE and self.loaded.whole:
            self.pristine.take(self.loaded.whole)
            self.loaded, self._base_is_loaded = BASE, True
        self.merged_from = "" if self.loaded == BASE else source

    async def reload(self, ref: AdapterRef | None) -> None:
        """Load anew what was there, into an engine that has just started.

        Raises:
            Incompatible, Unavailable: it could not be.
        """
        wanted, self._broken = self.loaded, False
        if self.missing:
            return
        self._base_is_loaded = self.pristine.model is not None
        if wanted == BASE and self._base_is_loaded:
            return
        reports = await self._load(wanted)
        if errors := [report.error for report in reports if report.error]:
            self._broken = True
            raise EngineDead(f"the weights of {ref or 'the base'} could not be loaded: {errors[0]}")
