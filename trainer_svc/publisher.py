"""The version store and its stream: one immutable buffer a version, shared by all subscribers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass

from refit.v1 import adapter_pb2

from common.adapter import AdapterRef, Manifest
from common.signal import Signal
from common.wire import CHUNK_BYTES, crc32c, manifest_to_proto, ref_to_proto

Event = adapter_pb2.AdapterUpdateResponse


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """A version and its flat buffer, which nobody may write to any more."""

    ref: AdapterRef
    manifest: Manifest
    buffer: memoryview


class Publisher:
    """Keeps the newest `keep` versions of every adapter of one run.

    publisher.publish("default", manifest, buffer, version=1)
    async for event in publisher.subscribe(adapters=[], held=[]):
        ...
    """

    def __init__(self, run_id: str, *, keep: int, heartbeat_seconds: float = 5.0) -> None:
        self.run_id = run_id
        self._keep = keep
        self._heartbeat_seconds = heartbeat_seconds
        self._versions: dict[str, list[PublishedVersion]] = {}
        self._changed = Signal()
        self._closed = False

    def publish(
        self, adapter: str, manifest: Manifest, buffer: memoryview, *, version: int
    ) -> AdapterRef:
        """Make a version current; the oldest one over `keep` is retired.

        `version` grows with every call for the same adapter: the caller's books, which outlive this
        process, say which numbers are spent.
        """
        kept = self._versions.setdefault(adapter, [])
        assert not kept or version > kept[-1].ref.version, "versions only grow"
        ref = AdapterRef(self.run_id, adapter, version, manifest.digest())
        kept.append(PublishedVersion(ref, manifest, buffer.toreadonly()))
        del kept[: -self._keep]
        self._changed.notify()
        return ref

    def refs(self) -> list[AdapterRef]:
        """The versions kept, oldest first."""
        return [version.ref for kept in self._versions.values() for version in kept]

    def close(self) -> None:
        """End every subscription."""
        self._closed = True
        self._changed.notify()

    async def subscribe(
        self, *, adapters: Iterable[str], held: Iterable[AdapterRef]
    ) -> AsyncGenerator[Event]:
        """The events of one subscription, for ever.

        Args:
            adapters: names wanted; none means all.
            held: what the subscriber serves already; retired where the run has it no more.
        """
        wanted, known = set(adapters), set(held)

        def behind() -> bool:
            stale = not known <= set(self.refs())
            return self._closed or stale or self._next_for(wanted, known) is not None

        while not self._closed:
            if version := self._next_for(wanted, known):
                for event in update_events(version):
                    yield event
                known.add(version.ref)
            elif stale := known - set(self.refs()):
                # After the update, so that a subscriber is never left without a version.
                for ref in stale:
                    known.discard(ref)
                    yield Event(retire=adapter_pb2.AdapterRetire(ref=ref_to_proto(ref)))
            elif not await self._changed.wait_until(
                behind, timeout_seconds=self._heartbeat_seconds
            ):
                beat = adapter_pb2.Heartbeat(interval_seconds=self._heartbeat_seconds)
                yield Event(heartbeat=beat)

    def _next_for(self, wanted: set[str], known: set[AdapterRef]) -> PublishedVersion | None:
        """The newest version of an adapter that the subscriber lacks: latest wins."""
        newest = (kept[-1] for name, kept in self._versions.items() if not wanted or name in wanted)
        return next((version for version in newest if version.ref not in known), None)


def update_events(version: PublishedVersion, *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Event]:
    """One update: manifest, chunks in order, commit."""
    yield Event(manifest=manifest_to_proto(version.ref, version.manifest))
    for offset in range(0, len(version.buffer), chunk_bytes):
        data = bytes(version.buffer[offset : offset + chunk_bytes])
        chunk = adapter_pb2.AdapterChunk(offset_bytes=offset, data=data, crc32c=crc32c(data))
        yield Event(chunk=chunk)
    yield Event(commit=adapter_pb2.AdapterCommit(ref=ref_to_proto(version.ref)))
