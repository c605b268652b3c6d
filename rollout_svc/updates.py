"""Applies the events of a subscription to the registry, and says what became of each update."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from refit.v1 import adapter_pb2, version_pb2

from common.errors import CorruptUpdate, RefitError
from common.wire import ref_from_proto, ref_to_proto
from rollout_svc.adapters import AdapterRegistry
from rollout_svc.metrics import Metrics
from rollout_svc.receiver import Limits, Staged, Update

log = logging.getLogger(__name__)

Report = Callable[[adapter_pb2.ReportAdapterRequest], Awaitable[None]]


@dataclass(slots=True)
class UpdateApplier:
    """Takes one event at a time, in the order of the stream.

    A refused update is reported, and what still comes of it is skipped; nothing else changes.
    `report` is called after the registry has changed, so whoever hears of a version can use it.
    """

    registry: AdapterRegistry
    limits: Limits
    staging: Path
    metrics: Metrics
    report: Report
    _update: Update | None = None
    _skipping: bool = False
    _directories: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    async def apply(self, event: adapter_pb2.AdapterUpdateResponse) -> None:
        """Take the next event.

        Raises:
            CorruptUpdate: the events come out of order.
            InvalidField: what is to be retired has no sound name.
        """
        match event.WhichOneof("event"):
            case "manifest":
                await self._begin(event.manifest)
            case "chunk":
                await self._write(event.chunk)
            case "commit":
                await self._commit(event.commit)
            case "retire":
                await self.registry.retire(ref_from_proto(event.retire.ref))
                self.metrics.adapters_live.set(len(self.registry.listing()))

    def abandon(self) -> None:
        """Forget a half-received update: its stream has ended."""
        if self._update is not None:
            self._update.discard()
        self._update, self._skipping = None, False

    async def _begin(self, manifest: adapter_pb2.AdapterManifest) -> None:
        if self._update is not None:
            raise CorruptUpdate(f"manifest: came while {self._update.ref} was still open")
        self._skipping = False
        path = self.staging / str(next(self._directories))
        try:
            self._update = Update(manifest, path=path, limits=self.limits)
        except RefitError as error:
            await self._refuse(manifest.ref, error)

    async def _write(self, chunk: adapter_pb2.AdapterChunk) -> None:
        if (update := self._opened("chunk")) is None:
            return
        try:
            update.write(chunk)
        except RefitError as error:
            self.abandon()
            await self._refuse(ref_to_proto(update.ref), error)

    async def _commit(self, commit: adapter_pb2.AdapterCommit) -> None:
        if (update := self._opened("commit")) is None:
            return
        self._update = None
        try:
            staged = await update.finish(commit)
            await self._load(staged)
        except RefitError as error:
            await self._refuse(ref_to_proto(update.ref), error)

    def _opened(self, event: str) -> Update | None:
        if self._update is None and not self._skipping:
            raise CorruptUpdate(f"{event}: came without a manifest; the stream is out of order")
        return self._update

    async def _load(self, staged: Staged) -> None:
        begun = time.monotonic()
        reports = await self.registry.commit(staged.ref, staged.path)
        parts = {
            "wire": staged.wire_seconds,
            "stage": staged.stage_seconds,
            "commit": time.monotonic() - begun,
        }
        for part, seconds in parts.items():
            self.metrics.update_seconds.labels(part).observe(seconds)
        self.metrics.updates.labels("committed").inc()
        self.metrics.adapters_live.set(len(self.registry.listing()))
        log.info("committed %s in %.3f s", staged.ref, sum(parts.values()))
        await self.report(
            adapter_pb2.ReportAdapterRequest(
                ref=ref_to_proto(staged.ref),
                outcome=adapter_pb2.OUTCOME_COMMITTED,
                timings=adapter_pb2.UpdateTimings(
                    **{f"{part}_seconds": seconds for part, seconds in parts.items()}
                ),
                bound_modules=[report.bound_modules for report in reports],
            )
        )

    async def _refuse(self, ref: version_pb2.AdapterRef, error: RefitError) -> None:
        self._skipping = True
        self.metrics.updates.labels("refused").inc()
        log.error("refused %s@%d: %s", ref.adapter, ref.version, error)
        await self.report(
            adapter_pb2.ReportAdapterRequest(
                ref=ref, outcome=adapter_pb2.OUTCOME_REFUSED, reason=str(error)
            )
        )
