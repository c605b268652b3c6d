"""One update from its manifest to a verified PEFT directory that the engine can load."""

from __future__ import annotations

import asyncio
import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from refit.v1 import adapter_pb2

from common.adapter import AdapterRef, TensorSpec
from common.errors import CorruptUpdate, InvalidField, NotHeld, WrongDigest
from common.peft_dir import PeftWriter
from common.stream import codec
from common.stream.content import Content, Delta
from common.stream.frames import AnyChunk
from common.stream.pieces import Piece, plan_pieces
from common.stream.verifier import Verifier
from common.wire import MAX_CHUNK_BYTES, ManifestReader, crc32c, ref_from_proto
from rollout_svc.updates.limits import Limits

T = TypeVar("T")

_SLICE_BYTES = 4 << 20
"""Copied at a time; generation goes on in between."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A complete, verified adapter on the staging file system, and what it took."""

    content: Content
    path: Path
    wire_seconds: float
    stage_seconds: float


class Update:
    """A half-received update. End it with `finish` or `discard`, or its directory stays.

    Args:
        reader: its whole manifest.
        held: versions that are here; what is not sent is copied from them.
        merge: it is to take the place of the engine's own weights.
        keep_deltas: remember them as they came, for others to be passed on.

    Raises, when opened:
        InvalidField, CorruptUpdate: the manifest is malformed.
        Incompatible: it does not fit this replica.
        NotHeld: it is a delta to a version that is not here.
        StagingFull: there is no room for it.
        StagingFailed: the file system has another error; `write` and `finish` raise it too.
    """

    def __init__(
        self,
        reader: ManifestReader,
        *,
        path: Path,
        limits: Limits,
        held: Sequence[Content],
        merge: bool,
        keep_deltas: bool,
    ) -> None:
        self._last, self._wire_seconds = time.monotonic(), 0.0
        self._manifest = manifest = reader.manifest()
        limits.check(manifest, merge=merge)
        self._keep_deltas = keep_deltas
        self._verifier = Verifier(manifest)
        self._specs = [spec for spec in manifest.tensors if not spec.alias_of]
        self._begins = [spec.offset_bytes for spec in self._specs]
        self._refer(reader, held)
        self._writer = PeftWriter(path, manifest)
        self._buffer = self._writer.buffer
        self.content = Content(
            reader.ref,
            manifest,
            self._buffer,
            canary=reader.canary,
            rules=reader.rules,
            delta_base=reader.delta_base,
        )

    @property
    def ref(self) -> AdapterRef:
        return self.content.ref

    @property
    def received_bytes(self) -> int:
        return self.content.arrived_bytes

    @property
    def idle_seconds(self) -> float:
        """Time since anything of it came."""
        return time.monotonic() - self._last

    def resume(self, reader: ManifestReader, *, held: Sequence[Content]) -> None:
        """Go on where an earlier stream broke; raises `NotHeld`."""
        self._refer(reader, held)
        # No byte could flow in between: the time says nothing of the link.
        self._last = time.monotonic()

    def _refer(self, reader: ManifestReader, held: Sequence[Content]) -> None:
        """Find what is here of what the update refers to."""
        self._held = held
        self._by_digest: dict[bytes, tuple[Content, TensorSpec]] | None = None
        self._base, self._pieces = None, list[Piece]()
        if reader.delta_base is not None:
            self._base = next((c for c in held if c.ref == reader.delta_base), None)
            if self._base is None:
                raise NotHeld(f"manifest.delta_base: {reader.delta_base} is not held here any more")
            self._pieces = plan_pieces(self._manifest, held=(), base=self._base.manifest)

    async def write(self, chunk: AnyChunk) -> None:
        """Take the next piece.

        Raises:
            CorruptUpdate: it is another than the next, too long or damaged; it can be sent again.
            WrongDigest: a tensor is complete and not what was published.
            NotHeld: it refers to bytes that are not here.
        """
        data = chunk.data
        begin, end = chunk.offset_bytes, chunk.offset_bytes + (chunk.decoded_bytes or len(data))
        self._check_place(begin, end)
        if crc32c(data) != chunk.crc32c:
            raise CorruptUpdate(
                f"chunk.crc32c: differs from that of the data at {begin} of {self.ref}; "
                "send it again"
            )
        match chunk.encoding:
            case adapter_pb2.ENCODING_RAW | adapter_pb2.ENCODING_UNSPECIFIED:
                self._take_raw(data, begin, end)
            case adapter_pb2.ENCODING_HELD:
                await self._take_held(begin, end)
            case adapter_pb2.ENCODING_DELTA_ZSTD:
                self._take_delta(data, begin, end)
            case unknown:
                raise InvalidField(f"chunk.encoding: {unknown} is none this version knows")
        self.content.advance(end)
        now = time.monotonic()
        self._wire_seconds += now - self._last
        self._last = now

    def _check_place(self, begin: int, end: int) -> None:
        if begin != self.received_bytes:
            raise CorruptUpdate(
                f"chunk.offset_bytes: {begin} of {self.ref}, but {self.received_bytes} bytes came "
                "so far; send it again"
            )
        if not begin < end <= len(self._buffer):
            raise CorruptUpdate(
                f"chunk.data: ends at {end} of {self.ref}; a chunk is not empty and ends within "
                f"the manifest's {len(self._buffer)} bytes"
            )

    def _take_raw(self, data: bytes | memoryview, begin: int, end: int) -> None:
        if end - begin != len(data):
            raise CorruptUpdate(
                f"chunk.decoded_bytes: {end - begin}, but {len(data)} raw bytes came; send it again"
            )
        self._take(begin, data)

    def _take(self, begin: int, data: bytes | memoryview) -> None:
        """Store decoded bytes, and check what they complete; who is told of them may read them."""
        self._writer.write(begin, data)
        self._verifier.update(data)

    async def _take_held(self, begin: int, end: int) -> None:
        taken = begin
        for source in self._sources(begin, end):
            self._take(taken, source)
            taken += len(source)
            if taken - self.received_bytes >= _SLICE_BYTES:
                # Told of before the wait: it may be the last of this stream.
                self.content.advance(taken)
                await asyncio.sleep(0)

    def _sources(self, begin: int, end: int) -> list[memoryview]:
        """The bytes of each held tensor, or of the rest of one, in order."""
        if self._by_digest is None:
            self._by_digest = {s.digest: (c, s) for c in self._held for s in c.manifest.tensors}
        sources = []
        for spec in self._specs[bisect.bisect_right(self._begins, begin) - 1 :]:
            if spec.offset_bytes >= end:
                break
            if spec.digest not in self._by_digest:
                raise NotHeld(f"tensor {spec.name!r}: the sender takes it for held; it is not")
            content, held = self._by_digest[spec.digest]
            if held.size_bytes != spec.size_bytes:
                raise WrongDigest(
                    f"tensor {spec.name!r}: {spec.size_bytes} bytes with the digest of "
                    f"{held.size_bytes} others; they are not what was published"
                )
            first, last = max(spec.offset_bytes, begin), min(spec.end_bytes, end)
            shift = held.offset_bytes - spec.offset_bytes
            sources.append(content.buffer[first + shift : last + shift])
        return sources

    def _take_delta(self, data: bytes | memoryview, begin: int, end: int) -> None:
        piece = self._piece(begin, end)
        assert self._base is not None, "pieces come from a base"
        shift = piece.base_begin - piece.begin
        base = self._base.buffer[begin + shift : end + shift]
        decoded = memoryview(bytearray(end - begin))
        codec.decode(data, base, decoded, itemsize=piece.itemsize)
        self._take(begin, decoded)
        if self._keep_deltas:
            self.content.deltas[self._base.ref.digest, begin] = Delta(end, bytes(data))

    def _piece(self, begin: int, end: int) -> Piece:
        """The run of tensors with a counterpart in the base that the bytes lie in."""
        at = bisect.bisect_right(self._pieces, begin, key=lambda piece: piece.begin) - 1
        piece = self._pieces[at] if at >= 0 else None
        if end - begin > MAX_CHUNK_BYTES:
            raise CorruptUpdate(
                f"chunk.decoded_bytes: {end - begin}; a delta is of at most {MAX_CHUNK_BYTES}"
            )
        if piece is None or not piece.itemsize or end > piece.end:
            raise CorruptUpdate(
                f"chunk.encoding: a delta for bytes {begin} to {end} of {self.ref}, which have no "
                "counterpart in its base; send them raw"
            )
        if (begin - piece.begin) % piece.itemsize or (end - begin) % piece.itemsize:
            raise CorruptUpdate(
                f"chunk.offset_bytes: a delta for bytes {begin} to {end} cuts a word of "
                f"{piece.itemsize} bytes; send whole ones"
            )
        return piece

    async def finish(self, commit: adapter_pb2.AdapterCommit) -> Staged:
        """Check that nothing is missing; every digest was checked by then.

        Raises `CorruptUpdate`, and then nothing has changed.
        """
        begun = time.monotonic()
        if ref_from_proto(commit.ref) != self.ref:
            raise CorruptUpdate(f"commit.ref: not that of the open update, {self.ref}")
        if self.received_bytes != len(self._buffer):
            raise CorruptUpdate(
                f"commit: {self.received_bytes} of {len(self._buffer)} bytes of {self.ref} "
                "arrived; send the rest"
            )
        self.content.finish()
        path = await _in_thread(self._writer.finish)
        return Staged(
            content=self.content,
            path=path,
            wire_seconds=self._wire_seconds,
            stage_seconds=time.monotonic() - begun,
        )

    def discard(self, reason: str) -> None:
        """Remove what came so far; whoever is passed its bytes on is told why."""
        self.content.fail(reason)
        self._writer.discard()


async def open_update(
    reader: ManifestReader,
    *,
    path: Path,
    limits: Limits,
    held: Sequence[Content],
    merge: bool,
    keep_deltas: bool,
) -> Update:
    """An `Update`, opened in a thread: reserving a gigabyte takes a third of a second."""
    opening = asyncio.ensure_future(
        asyncio.to_thread(
            Update,
            reader,
            path=path,
            limits=limits,
            held=held,
            merge=merge,
            keep_deltas=keep_deltas,
        )
    )
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        await asyncio.wait([opening])
        if not opening.exception():
            opening.result().discard("its stream ended")
        raise


async def _in_thread(work: Callable[[], T]) -> T:
    """A thread heeds no cancellation: it is seen to its end, for it uses an open file."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    finally:
        await asyncio.wait([running])
