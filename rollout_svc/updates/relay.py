"""A replica as a source for others: what it holds, and what is just arriving, passed on."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field

from refit.v1 import adapter_pb2, adapter_pb2_grpc

from common.adapter import AdapterRef
from common.errors import Incompatible, InvalidField, QueueFull, Unavailable
from common.grpc_server import Context
from common.signal import Signal
from common.stream.content import Content
from common.stream.frames import Message
from common.stream.sender import Pace, Receiver, update_events
from common.wire import ref_from_proto, ref_to_proto
from rollout_svc.versions.registry import AdapterRegistry


@dataclass(slots=True)
class Relay:
    """Serves the versions of this replica to at most `max_children` others."""

    registry: AdapterRegistry
    max_children: int
    pace: Pace = field(default_factory=Pace)
    _arriving: list[Content] = field(default_factory=list)
    _children: list[_Child] = field(default_factory=list)
    _closed: bool = False
    _changed: Signal = field(default_factory=Signal)

    def begin(self, content: Content) -> None:
        """A version is arriving: what comes of it is passed on."""
        self._arriving.append(content)
        self._changed.notify()

    def end(self, content: Content) -> None:
        """It is committed, and so among the registry's; or it failed."""
        self._arriving.remove(content)
        self._changed.notify()

    def send_away(self, digest: bytes, reason: str) -> None:
        """A version is refused here: children it has not been sent to go back to the trainer."""
        for child in self._children:
            if all(ref.digest != digest for ref in child.known()):
                child.sent_away = reason
        self._changed.notify()

    def close(self) -> None:
        """End every child's stream; they go back to the trainer."""
        self._closed = True
        self._changed.notify()

    async def subscribe(self, request: adapter_pb2.AdapterUpdateRequest) -> AsyncGenerator[Message]:
        """The updates of one run, for ever.

        Raises:
            InvalidField: no run is named, or a version is malformed.
            Incompatible: the child serves another base model.
            QueueFull: there are as many children as are taken.
            Unavailable: an update failed here, and so cannot be passed on.
        """
        child = self._admit(request)
        with self._counted(child):
            yield self.pace.heartbeat()
            while not self._closed:
                if child.sent_away:
                    raise Unavailable(f"this relay refused an update: {child.sent_away}")
                if content := self._next_for(child):
                    receiver = self._receiver(child, content)
                    child.sent[content.ref.adapter] = content.ref
                    events = update_events(content, receiver, pace=self.pace)
                    async with contextlib.aclosing(events):
                        async for event in events:
                            yield event
                elif not await self._something_for(child):
                    yield self.pace.heartbeat()

    def _admit(self, request: adapter_pb2.AdapterUpdateRequest) -> _Child:
        if not request.run_id:
            raise InvalidField("run_id: empty; say which run to relay, as the trainer did")
        fingerprint = self.registry.weights.base.fingerprint
        if request.base_model.fingerprint != fingerprint:
            raise Incompatible(
                f"base_model: fingerprint {request.base_model.fingerprint!r}, this relay serves "
                f"{fingerprint!r}; take another parent"
            )
        if len(self._children) >= self.max_children:
            raise QueueFull(
                f"max_children: this relay serves {self.max_children} replicas and takes no more"
            )
        partial = request.partial if request.HasField("partial") else None
        if partial and partial.received_bytes < 0:
            raise InvalidField(f"partial.received_bytes: {partial.received_bytes}; at least 0")
        return _Child(
            run_id=request.run_id,
            wanted=frozenset(request.adapters),
            held=frozenset(map(ref_from_proto, request.held)),
            partial=(ref_from_proto(partial.ref), partial.received_bytes) if partial else None,
            encodings=frozenset(request.capabilities.encodings),
        )

    @contextlib.contextmanager
    def _counted(self, child: _Child) -> Iterator[None]:
        self._children.append(child)
        try:
            yield
        finally:
            self._children.remove(child)

    async def _something_for(self, child: _Child) -> bool:
        return await self._changed.wait_until(
            lambda: self._closed or bool(child.sent_away) or self._next_for(child) is not None,
            timeout_seconds=self.pace.heartbeat_seconds,
        )

    def _next_for(self, child: _Child) -> Content | None:
        """The newest version of an adapter that the child lacks: latest wins."""
        newest: dict[str, Content] = {}
        for content in [*self.registry.contents(), *self._arriving]:
            if content.ref.run_id == child.run_id:
                older = newest.get(content.ref.adapter)
                if older is None or older.ref.version < content.ref.version:
                    newest[content.ref.adapter] = content
        return next((c for c in newest.values() if child.lacks(c.ref)), None)

    def _receiver(self, child: _Child, content: Content) -> Receiver:
        """Deltas are passed on as they came, where the child has what they refer to."""
        known = child.known()
        held = [c for c in self.registry.contents() if c.ref in known and c.ref != content.ref]
        base = next((c for c in held if c.ref == content.delta_base), None)
        partial_ref, received_bytes = child.partial or (None, 0)
        return Receiver(
            held=held if adapter_pb2.ENCODING_HELD in child.encodings else (),
            base=base if adapter_pb2.ENCODING_DELTA_ZSTD in child.encodings else None,
            start_bytes=received_bytes if partial_ref == content.ref else 0,
        )


@dataclass(slots=True, eq=False)
class _Child:
    run_id: str
    wanted: frozenset[str]
    held: frozenset[AdapterRef]
    partial: tuple[AdapterRef, int] | None
    encodings: frozenset[adapter_pb2.Encoding]
    sent: dict[str, AdapterRef] = field(default_factory=dict)
    """The last version of each adapter that it got from here."""

    sent_away: str = ""
    """Why it has to ask elsewhere."""

    def known(self) -> frozenset[AdapterRef]:
        """What it has, by its own word or from here."""
        return self.held.union(self.sent.values())

    def lacks(self, ref: AdapterRef) -> bool:
        """Whether these bytes are new to it, and newer: it may have been ahead of this relay.

        Bytes that it has under another name are for the trainer to name.
        """
        if self.wanted and ref.adapter not in self.wanted:
            return False
        return not any(
            known.digest == ref.digest
            or (
                (known.run_id, known.adapter) == (ref.run_id, ref.adapter)
                and known.version >= ref.version
            )
            for known in self.known()
        )


@dataclass(slots=True)
class RelayServicer(adapter_pb2_grpc.AdapterServiceServicer):
    """`AdapterService` of a replica: only what a relay can answer."""

    relay: Relay

    async def AdapterUpdate(
        self, request: adapter_pb2.AdapterUpdateRequest, context: Context
    ) -> AsyncGenerator[Message]:
        events = self.relay.subscribe(request)
        async with contextlib.aclosing(events):
            async for event in events:
                yield event

    async def ListAdapters(
        self, request: adapter_pb2.AdapterServiceListAdaptersRequest, context: Context
    ) -> adapter_pb2.AdapterServiceListAdaptersResponse:
        refs = map(ref_to_proto, self.relay.registry.listing())
        return adapter_pb2.AdapterServiceListAdaptersResponse(adapters=refs)
