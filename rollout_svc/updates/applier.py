"""Applies the events of a subscription to the registry, and says what became of each update."""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import InitVar, dataclass, field
from pathlib import Path

from refit.v1 import adapter_pb2, version_pb2

from common.errors import (
    CanaryRefused,
    CorruptUpdate,
    Incompatible,
    InvalidField,
    NotHeld,
    RefitError,
    StagingFailed,
    WrongDigest,
)
from common.stream.frames import AnyChunk, Chunk, Message
from common.wire import ManifestReader, ref_from_proto, ref_to_proto
from rollout_svc.metrics import Metrics
from rollout_svc.updates.limits import Limits
from rollout_svc.updates.outcomes import Outcomes, Report
from rollout_svc.updates.receiver import Staged, Update, open_update
from rollout_svc.updates.relay import Relay
from rollout_svc.versions.registry import AdapterRegistry

log = logging.getLogger(__name__)

_KEEP_HALF_SECONDS = 600.0
"""How long a half-received update takes up space while nothing of it comes."""

_MAX_TABLE_BYTES = 64 << 20
"""A table of the longest kind takes less; it is held in memory before it can be checked whole."""

_ENVELOPE_BYTES = 32
"""What a chunk's other fields and its framing take, near enough."""


@dataclass(slots=True)
class UpdateApplier:
    """Takes one event at a time, in the order of one trainer's stream.

    A refused update is reported, and what still comes of it is skipped; nothing else changes. When
    the stream breaks in the middle of an update, `suspend` keeps what came, for the next stream to
    go on with. `report` is called after the registry has changed, so whoever hears of a version can
    use it. What comes is put under `staging`, which no other applier may write to.
    """

    source: str
    registry: AdapterRegistry
    relay: Relay
    limits: Limits
    staging: Path
    metrics: Metrics
    report: InitVar[Report]
    outcomes: Outcomes = field(init=False)
    _reader: ManifestReader | None = None
    _update: Update | None = None
    _suspended: Update | None = None
    _skipping: bool = False
    _wire_bytes: int = 0
    _directories: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self, report: Report) -> None:
        self.outcomes = Outcomes(self.source, self.registry, self.metrics, report)

    async def apply(self, event: Message) -> None:
        """Take the next event.

        Raises:
            CorruptUpdate: the events come out of order, or a chunk is damaged: subscribe again.
            NotHeld: the trainer takes something for held that is not: subscribe again.
            InvalidField: what is to be retired has no sound name.
        """
        if isinstance(event, Chunk):
            await self._write(event)
            return
        match event.WhichOneof("event"):
            case "manifest":
                await self._begin(event.manifest)
            case "tensors":
                await self._read_table(event.tensors)
            case "chunk":
                await self._write(event.chunk)
            case "commit":
                await self._commit(event.commit)
            case "alias":
                await self._alias(event.alias)
            case "retire":
                self.registry.retire(ref_from_proto(event.retire.ref), source=self.source)
                self.metrics.adapters_live.set(len(self.registry.listing()))

    def partial(self) -> adapter_pb2.PartialUpdate | None:
        """What is here of an update whose stream broke, and not too long ago."""
        if self._suspended is not None and self._suspended.idle_seconds > _KEEP_HALF_SECONDS:
            self._drop_suspended("the rest did not come")
        if (half := self._suspended) is None:
            return None
        return adapter_pb2.PartialUpdate(
            ref=ref_to_proto(half.ref), received_bytes=half.received_bytes
        )

    def suspend(self) -> None:
        """The stream has ended: keep what came of an update."""
        if self._update is not None:
            self._suspended = self._update
        self._reader = self._update = None
        self._skipping = False

    def close(self) -> None:
        """Forget what came of an update: none will follow."""
        self.suspend()
        self._drop_suspended("the replica stops")

    def _drop_suspended(self, reason: str) -> None:
        half, self._suspended = self._suspended, None
        if half is not None:
            half.discard(reason)
            self.relay.end(half.content)

    async def _begin(self, manifest: adapter_pb2.AdapterManifest) -> None:
        if self._update is not None or self._reader is not None:
            raise CorruptUpdate(f"manifest: {manifest.ref.version} came while another was open")
        self._skipping = False
        self._wire_bytes = 0
        self._came(manifest.ByteSize())
        try:
            self._reader = ManifestReader(manifest)
            self.metrics.was_sent(self._reader.ref)
            await self._open_if_complete()
        except RefitError as error:
            await self._refuse(manifest.ref, error, _opening_stage(error))

    async def _read_table(self, tensors: adapter_pb2.ManifestTensors) -> None:
        if self._skipping:
            return
        if self._reader is None:
            raise CorruptUpdate("tensors: came without a manifest; the stream is out of order")
        self._came(tensors.ByteSize())
        ref = ref_to_proto(self._reader.ref)
        try:
            self._check_table_size()
            self._reader.add(tensors)
            await self._open_if_complete()
        except RefitError as error:
            await self._refuse(ref, error, _opening_stage(error))

    def _came(self, wire_bytes: int) -> None:
        self._wire_bytes += wire_bytes
        self.metrics.wire_bytes.inc(wire_bytes)

    def _check_table_size(self) -> None:
        if self._wire_bytes > _MAX_TABLE_BYTES:
            raise Incompatible(
                f"manifest.tensors: a table above {_MAX_TABLE_BYTES} bytes; use PEFT's names"
            )

    async def _open_if_complete(self) -> None:
        reader = self._reader
        if reader is None or not reader.complete:
            return
        self._reader = None
        self.registry.check_fits(
            reader.ref,
            reader.kind,
            reader.base_fingerprint,
            rules=reader.rules,
            source=self.source,
        )
        held = self.registry.contents()
        if self._suspended is not None and self._suspended.ref == reader.ref:
            self._suspended.resume(reader, held=held)
            self._update, self._suspended = self._suspended, None
            return
        self._drop_suspended("another update came instead")
        self._update = await open_update(
            reader,
            path=self.staging / str(next(self._directories)),
            limits=self.limits,
            held=held,
            merge=self.registry.is_merged(reader.kind, reader.rules),
            keep_deltas=self.relay.max_children > 0,
        )
        self.relay.begin(self._update.content)

    async def _write(self, chunk: AnyChunk) -> None:
        if (update := self._opened("chunk")) is None:
            return
        self._came(len(chunk.data) + _ENVELOPE_BYTES)
        try:
            await update.write(chunk)
        except (WrongDigest, StagingFailed) as error:
            await self._give_up(update, error, adapter_pb2.UPDATE_STAGE_STAGE)
        except (CorruptUpdate, InvalidField) as error:
            await self._refuse(ref_to_proto(update.ref), error, adapter_pb2.UPDATE_STAGE_WIRE)
            raise

    async def _commit(self, commit: adapter_pb2.AdapterCommit) -> None:
        if (update := self._opened("commit")) is None:
            return
        try:
            staged = await update.finish(commit)
        except StagingFailed as error:
            await self._give_up(update, error, adapter_pb2.UPDATE_STAGE_STAGE)
            return
        except (CorruptUpdate, InvalidField) as error:
            await self._refuse(ref_to_proto(update.ref), error, adapter_pb2.UPDATE_STAGE_WIRE)
            raise
        self._update = None
        try:
            await self._load(staged)
        except CanaryRefused as error:
            await self._refuse(ref_to_proto(update.ref), error, adapter_pb2.UPDATE_STAGE_CANARY)
        except RefitError as error:
            await self._refuse(ref_to_proto(update.ref), error, adapter_pb2.UPDATE_STAGE_LOAD)
        finally:
            self.relay.end(update.content)

    def _opened(self, event: str) -> Update | None:
        if self._update is None and not self._skipping:
            raise CorruptUpdate(f"{event}: came without a manifest; the stream is out of order")
        return self._update

    async def _load(self, staged: Staged) -> None:
        begun = time.monotonic()
        committed = await self.registry.commit(staged.content, staged.path, source=self.source)
        parts = {
            "wire": staged.wire_seconds,
            "stage": staged.stage_seconds,
            "commit": time.monotonic() - begun,
        }
        for part, seconds in parts.items():
            self.metrics.update_seconds.labels(part).observe(seconds)
        log.info("committed %s in %.3f s", staged.content.ref, sum(parts.values()))
        await self.outcomes.committed(
            adapter_pb2.ReportAdapterRequest(
                ref=ref_to_proto(staged.content.ref),
                timings=adapter_pb2.UpdateTimings(
                    **{f"{part}_seconds": seconds for part, seconds in parts.items()}
                ),
                bound_modules=[report.bound_modules for report in committed.reports],
                wire_bytes=self._wire_bytes,
                canary_difference=committed.canary_difference,
            )
        )

    async def _alias(self, alias: adapter_pb2.AdapterAlias) -> None:
        ref = ref_from_proto(alias.ref)
        try:
            await self.registry.alias(ref, source=self.source)
        except NotHeld:
            raise
        except RefitError as error:
            await self.outcomes.refused(alias.ref, error, adapter_pb2.UPDATE_STAGE_LOAD)
            return
        log.info("committed %s, whose bytes were here", ref)
        await self.outcomes.committed(adapter_pb2.ReportAdapterRequest(ref=alias.ref))

    async def _give_up(
        self, update: Update, error: RefitError, stage: adapter_pb2.UpdateStage
    ) -> None:
        """Refuse an update whose bytes are of no use."""
        self._update = None
        update.discard(str(error))
        self.relay.end(update.content)
        await self._refuse(ref_to_proto(update.ref), error, stage)

    async def _refuse(
        self, ref: version_pb2.AdapterRef, error: RefitError, stage: adapter_pb2.UpdateStage
    ) -> None:
        """Say why, and skip what still comes of the update."""
        if isinstance(error, NotHeld):
            # Nobody's fault: the trainer's picture of this replica was old.
            raise error
        self._skipping = True
        self._reader = None
        if stage != adapter_pb2.UPDATE_STAGE_WIRE:
            self.relay.send_away(ref.digest, str(error))
        await self.outcomes.refused(ref, error, stage)


def _opening_stage(error: RefitError) -> adapter_pb2.UpdateStage:
    if isinstance(error, StagingFailed):
        return adapter_pb2.UPDATE_STAGE_STAGE
    return adapter_pb2.UPDATE_STAGE_MANIFEST
