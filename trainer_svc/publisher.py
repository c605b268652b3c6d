"""The stream of versions to each subscriber: what it gets, from whom, and in which encoding."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Literal

from refit.v1 import adapter_pb2

from common.adapter import AdapterRef, Canary, Manifest
from common.errors import Unavailable
from common.rules import Rules
from common.signal import Signal
from common.stream.content import Content
from common.stream.encoder import DeltaEncoder
from common.stream.frames import Event, Message
from common.stream.sender import Pace, Receiver, update_events
from common.tasks import cancel
from common.wire import ref_to_proto
from trainer_svc.base_weights import BaseWeights
from trainer_svc.store import VersionStore
from trainer_svc.subscription import Subscription

DeltaMode = Literal["auto", "always", "never"]


class Publisher:
    """Distributes the versions of one run.

    publisher.publish("default", manifest, buffer, version=1)
    async for event in publisher.subscribe(Subscription()):
        ...
    """

    def __init__(
        self,
        run_id: str,
        *,
        keep: int,
        pace: Pace | None = None,
        delta: DeltaMode = "auto",
        base: BaseWeights | None = None,
    ) -> None:
        self.run_id = run_id
        self.base = base
        """What replicas without weights are sent first; None where it lies elsewhere."""

        self.store = VersionStore(run_id, keep=keep)
        self.pace = pace or Pace()
        self._delta = delta
        self._encoder = DeltaEncoder()
        self._changed = Signal()
        self._closed = False

    def publish(
        self,
        adapter: str,
        manifest: Manifest,
        buffer: memoryview,
        *,
        version: int,
        canary: Canary | None = None,
        rules: Rules = Rules(),  # noqa: B008 - frozen
    ) -> AdapterRef:
        """Make a version current; older ones above the limit are retired.

        `version` grows with every call for the same adapter: the caller's books, which outlive this
        process, say which numbers are spent. `rules` say how replicas take this version over.

        Raises:
            InvalidField: the name is empty, too long or no text, or the number below 1 or too high.
            AlreadyExists: the number is taken by other bytes.
        """
        ref = self.store.add(adapter, manifest, buffer, version=version, canary=canary, rules=rules)
        self._changed.notify()
        return ref

    def refs(self) -> list[AdapterRef]:
        """The versions kept."""
        return self.store.refs()

    @contextlib.contextmanager
    def pinned(self, adapter: str, version: int) -> Iterator[AdapterRef]:
        """Keep a version served inside the block; raises `AdapterNotFound` when it is gone."""
        with self.store.pinned(adapter, version) as ref:
            yield ref
        self._changed.notify()

    def holds(self, subscription: Subscription, held: Iterable[AdapterRef]) -> None:
        """The replica said what it holds now."""
        subscription.held = frozenset(held)
        self._changed.notify()

    def end(self, subscription: Subscription, reason: str) -> None:
        """Have one stream end with UNAVAILABLE."""
        subscription.ended = reason
        self._changed.notify()

    def close(self) -> None:
        """End every subscription."""
        self._closed = True
        self._encoder.close()
        self._changed.notify()

    async def subscribe(self, subscription: Subscription) -> AsyncGenerator[Message]:
        """The events of one subscription, for ever.

        Raises:
            Unavailable: the subscription was ended from this side.
        """
        now = asyncio.get_running_loop().time
        async with contextlib.aclosing(self._events(subscription)) as events:
            async for event in events:
                subscription.sending_since = now()
                yield event
                subscription.sending_since = None
                if self._over(subscription):
                    break
        if subscription.ended:
            raise Unavailable(f"replica_id: {subscription.ended}; subscribe again")

    def _over(self, subscription: Subscription) -> bool:
        return self._closed or bool(subscription.ended)

    async def _events(self, subscription: Subscription) -> AsyncGenerator[Message]:
        yield self.pace.heartbeat()
        if parent := subscription.parent:
            yield Event(
                parent=adapter_pb2.AdapterParent(
                    replica_id=parent.replica_id, address=parent.address, run_id=self.run_id
                )
            )
        if subscription.needs_base:
            async with contextlib.aclosing(self._bring_base(subscription)) as events:
                async for event in events:
                    yield event
        while not self._over(subscription):
            if content := self._next_for(subscription):
                subscription.sent[content.ref.adapter] = content.ref
                async with contextlib.aclosing(self._bring(content, subscription)) as events:
                    async for event in events:
                        yield event
            elif stale := self._stale(subscription):
                # After the update, so that a subscriber is never left without a version.
                for ref in stale:
                    subscription.held -= {ref}
                    yield Event(retire=adapter_pb2.AdapterRetire(ref=ref_to_proto(ref)))
            elif not await self._something_for(subscription):
                yield self.pace.heartbeat()

    async def _something_for(self, subscription: Subscription) -> bool:
        return await self._changed.wait_until(
            lambda: bool(
                self._over(subscription)
                or self._next_for(subscription)
                or self._stale(subscription)
            ),
            timeout_seconds=self.pace.heartbeat_seconds,
        )

    def _bring(self, content: Content, subscription: Subscription) -> AsyncGenerator[Message]:
        """An update, or an alias where the replica serves the bytes under another name."""
        if self._serves_bytes_of(content, subscription):
            return _alias(content.ref)
        return update_events(content, self._receiver(subscription, content), pace=self.pace)

    async def _bring_base(self, subscription: Subscription) -> AsyncGenerator[Message]:
        """The base's weights, once they are read; heartbeats until then."""
        assert self.base is not None, "admitted only where there is one"
        reading = asyncio.ensure_future(self.base.content(self.run_id))
        try:
            while not (await asyncio.wait([reading], timeout=self.pace.heartbeat_seconds))[0]:
                yield self.pace.heartbeat()
        finally:
            await cancel(reading)
        content = reading.result()
        receiver = self._receiver(subscription, content)
        async with contextlib.aclosing(update_events(content, receiver, pace=self.pace)) as events:
            async for event in events:
                yield event

    def _receiver(self, subscription: Subscription, content: Content) -> Receiver:
        partial_ref, received_bytes = subscription.partial or (None, 0)
        held = [found for ref in subscription.held if (found := self.store.find(ref))]
        return Receiver(
            held=held if adapter_pb2.ENCODING_HELD in subscription.encodings else (),
            # The newest version of this very adapter, if there is one.
            base=max(
                held if self._sends_deltas(subscription) else (),
                key=lambda h: (h.ref.adapter == content.ref.adapter, h.ref.version),
                default=None,
            ),
            start_bytes=received_bytes if partial_ref == content.ref else 0,
            encoder=self._encoder,
        )

    def _sends_deltas(self, subscription: Subscription) -> bool:
        if self._delta == "auto":
            wanted = subscription.link_bytes_per_second < self._encoder.bytes_per_second
        else:
            wanted = self._delta == "always"
        return wanted and adapter_pb2.ENCODING_DELTA_ZSTD in subscription.encodings

    def _next_for(self, subscription: Subscription) -> Content | None:
        """The newest version of an adapter that the subscriber lacks: latest wins.

        One that it has a part of goes first, lest that part be thrown away. From a parent the
        bytes come to it; an alias does not need any.
        """
        partial_ref, _ = subscription.partial or (None, 0)
        newest = [found for name in self.store.adapters() if (found := self.store.newest(name))]
        for content in sorted(newest, key=lambda found: found.ref != partial_ref):
            if not subscription.lacks(content.ref):
                continue
            if not subscription.parent or self._serves_bytes_of(content, subscription):
                return content
        return None

    def _serves_bytes_of(self, content: Content, subscription: Subscription) -> bool:
        """Whether it has them from a version that went by the same rule of merging."""
        twins = [ref for ref in subscription.held if ref.digest == content.ref.digest]
        found = (self.store.find(ref) for ref in twins)
        return any((t.rules.merge if t else None) is content.rules.merge for t in found)

    def _stale(self, subscription: Subscription) -> frozenset[AdapterRef]:
        """What the replica holds and the run has no more."""
        return subscription.held - frozenset(self.store.refs())


async def _alias(ref: AdapterRef) -> AsyncGenerator[Message]:
    yield Event(alias=adapter_pb2.AdapterAlias(ref=ref_to_proto(ref)))
