"""One update from its manifest to a verified PEFT directory that the engine can load."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from refit.v1 import adapter_pb2

from common.adapter import AdapterRef, Dtype, Layout, Manifest, verify
from common.errors import CorruptUpdate, Incompatible, RefitError
from common.peft_dir import PeftWriter
from common.wire import crc32c, manifest_from_proto, ref_from_proto


@dataclass(frozen=True, slots=True)
class Limits:
    """What this replica takes; `max_bytes` bounds one adapter."""

    base_fingerprint: str
    max_rank: int
    target_modules: frozenset[str]
    dtypes: frozenset[Dtype]
    max_bytes: int

    def check(self, manifest: Manifest) -> None:
        """Raises `Incompatible` naming the field, before any byte is taken."""
        lora = manifest.lora
        if manifest.base_fingerprint != self.base_fingerprint:
            raise Incompatible(
                f"manifest.base_fingerprint: {manifest.base_fingerprint[:12]}, this replica serves "
                f"{self.base_fingerprint[:12]}; start both on the same base model"
            )
        if lora.rank > self.max_rank:
            raise Incompatible(
                f"manifest.lora.rank: {lora.rank}, this replica takes up to {self.max_rank}; "
                "raise max_lora_rank"
            )
        if unknown := sorted(set(lora.target_modules) - self.target_modules):
            raise Incompatible(
                f"manifest.lora.target_modules: {', '.join(unknown)} cannot take an adapter here; "
                f"these can: {', '.join(sorted(self.target_modules))}"
            )
        if manifest.total_bytes > self.max_bytes:
            raise Incompatible(
                f"manifest.total_bytes: {manifest.total_bytes}, this replica takes up to "
                f"{self.max_bytes}; raise max_update_bytes"
            )
        self._check_tensors(manifest)

    def _check_tensors(self, manifest: Manifest) -> None:
        factors: dict[str, set[Layout]] = {}
        for spec in manifest.tensors:
            if spec.dtype not in self.dtypes:
                raise Incompatible(f"tensor {spec.name}: dtype {spec.dtype.value} is not taken")
            rank = spec.shape[0] if spec.layout is Layout.LORA_A else spec.shape[1]
            if rank != manifest.lora.rank:
                raise Incompatible(
                    f"tensor {spec.name}: shape {spec.shape} has rank {rank}, the manifest says "
                    f"{manifest.lora.rank}; ranks must be the same throughout"
                )
            module, mark, rest = spec.name.rpartition(f".{spec.layout.value}.")
            if not mark or rest != "weight":
                raise Incompatible(
                    f"tensor {spec.name}: tagged {spec.layout.value}, but not named so; use PEFT's "
                    "names"
                )
            factors.setdefault(module, set()).add(spec.layout)
        if lone := [module for module, found in factors.items() if len(found) != len(Layout)]:
            raise Incompatible(f"module {lone[0]}: has only one of lora_A and lora_B; send both")


@dataclass(frozen=True, slots=True)
class Staged:
    """A complete, verified adapter on the staging file system, and what it took."""

    ref: AdapterRef
    path: Path
    wire_seconds: float
    stage_seconds: float


class Update:
    """A half-received update. End it with `finish` or `discard`, or its directory stays.

    Raises, when opened:
        InvalidField, CorruptUpdate: the manifest is malformed.
        Incompatible: it does not fit this replica.
        StagingFull: there is no room for it.
    """

    def __init__(self, msg: adapter_pb2.AdapterManifest, *, path: Path, limits: Limits) -> None:
        self._begun = self._last = time.monotonic()
        self.ref, self._manifest = manifest_from_proto(msg)
        limits.check(self._manifest)
        self._writer = PeftWriter(path, self._manifest)
        self._received_bytes = 0

    def write(self, chunk: adapter_pb2.AdapterChunk) -> None:
        """Take the next piece; raises `CorruptUpdate` if it is another, too long or damaged."""
        data = chunk.data
        if chunk.offset_bytes != self._received_bytes:
            raise CorruptUpdate(
                f"chunk.offset_bytes: {chunk.offset_bytes} of {self.ref}, but "
                f"{self._received_bytes} bytes came so far; send it again"
            )
        end = self._received_bytes + len(data)
        if end > self._manifest.total_bytes:
            raise CorruptUpdate(
                f"chunk.data: ends at {end} of {self.ref}, past the manifest's "
                f"{self._manifest.total_bytes} bytes; send it again"
            )
        if crc32c(data) != chunk.crc32c:
            raise CorruptUpdate(
                f"chunk.crc32c: differs from that of the data at {chunk.offset_bytes} of "
                f"{self.ref}; send it again"
            )
        self._writer.buffer[self._received_bytes : end] = data
        self._received_bytes = end
        self._last = time.monotonic()

    async def finish(self, commit: adapter_pb2.AdapterCommit) -> Staged:
        """Check that nothing is missing and every tensor's digest.

        Raises `CorruptUpdate`, and then nothing is left on the file system.
        """
        begun = time.monotonic()
        try:
            self._check_complete(commit)
            await asyncio.to_thread(verify, self._manifest.tensors, self._writer.buffer)
        except RefitError:
            self.discard()
            raise
        path = await asyncio.to_thread(self._writer.finish)
        return Staged(
            ref=self.ref,
            path=path,
            wire_seconds=self._last - self._begun,
            stage_seconds=time.monotonic() - begun,
        )

    def _check_complete(self, commit: adapter_pb2.AdapterCommit) -> None:
        if ref_from_proto(commit.ref) != self.ref:
            raise CorruptUpdate(f"commit.ref: not that of the open update, {self.ref}")
        if self._received_bytes != self._manifest.total_bytes:
            raise CorruptUpdate(
                f"commit: {self._received_bytes} of {self._manifest.total_bytes} bytes of "
                f"{self.ref} arrived; send it again"
            )

    def discard(self) -> None:
        """Remove what came so far."""
        self._writer.discard()
