"""Membership by subscription: who is here, whose lease runs, who was lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import grpc
from refit.v1 import adapter_pb2

from common.adapter import AdapterRef
from common.errors import AlreadyExists, Incompatible, ReplicaNotFound, Unavailable
from common.model_dir import BaseModel
from common.signal import Signal
from common.wire import ref_from_proto
from trainer_svc.fleet.admission import Needed, check_names, check_request, needs_base_first
from trainer_svc.fleet.lines import Lines
from trainer_svc.fleet.relays import choose_parent
from trainer_svc.fleet.replica import Quarantine, Refusal, Replica
from trainer_svc.publisher import Publisher
from trainer_svc.subscription import Subscription

log = logging.getLogger(__name__)

_SHOW_LOST_SECONDS = 600.0
_END_SECONDS = 5.0
"""How long a stream may take to end by itself, once its replica has left."""


@dataclass(frozen=True, slots=True)
class LostReplica:
    """A replica that left without a goodbye."""

    id: str
    address: str
    reason: str
    at: float
    """On the monotonic clock."""

    refusals: Mapping[str, Refusal]
    quarantine: Quarantine | None


class Members:
    """The replicas whose subscriptions are open.

    Args:
        fan_out: streams that the trainer and each relay carry at most; 0 for no limit.
        open_channel: makes the channel to a replica's address.
    """

    def __init__(
        self,
        base: BaseModel,
        publisher: Publisher,
        *,
        fan_out: int,
        open_channel: Callable[[str], grpc.aio.Channel],
    ) -> None:
        self.needed: Needed | None = None
        """What a replica must be able to serve; before it is known, nobody can join."""

        self.changed = Signal()
        """Somebody came, left or changed."""

        self.refused: dict[str, str] = {}
        """Addresses of those that cannot serve the run, and why."""

        self._base = base
        self._publisher = publisher
        self._fan_out = fan_out
        self._lines = Lines(open_channel)
        self._replicas: dict[str, Replica] = {}
        self._lost: dict[str, LostReplica] = {}
        self._orphaning: dict[str, asyncio.TimerHandle] = {}
        """When the children of a replica that was lost have to look for another parent."""

    def __iter__(self) -> Iterator[Replica]:
        return iter(list(self._replicas.values()))

    def __getitem__(self, replica_id: str) -> Replica:
        """Raises `ReplicaNotFound` where no subscription with this id is open."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            raise ReplicaNotFound(f"replica_id: {replica_id!r} is not subscribed; do so")
        return replica

    def now(self, replica: Replica) -> Replica:
        """The one that took its place over, if there is one."""
        found = self._replicas.get(replica.id)
        return found if found and found.line is replica.line else replica

    @property
    def lost(self) -> list[LostReplica]:
        """Those that left in the last ten minutes without a goodbye, and did not come back."""
        oldest = time.monotonic() - _SHOW_LOST_SECONDS
        return [lost for lost in list(self._lost.values()) if lost.at > oldest]

    @contextlib.contextmanager
    def joined(self, request: adapter_pb2.AdapterUpdateRequest) -> Iterator[Replica]:
        """Membership for as long as the subscription is open.

        A replica whose connection broke takes its own place over again: quarantine, work and all.

        Raises:
            InvalidField, AlreadyExists: the request is malformed, or its id in use elsewhere.
            Incompatible: with every reason why the replica cannot serve this run.
            Unavailable: there is no adapter yet.
        """
        live = self._admit(request)
        subscription = self._subscription(request)
        if live:
            self._remove(live, "it subscribed anew")
        replica = self._make(request, subscription)
        self._replicas[replica.id] = replica
        if before := self._lost.pop(replica.id, None):
            replica.refusals, replica.quarantine = dict(before.refusals), before.quarantine
        self._arm(replica)
        parent = subscription.parent
        source = f"relay {parent.replica_id}" if parent else "this trainer"
        log.info("replica %s joined from %s, bytes from %s", replica.id, replica.address, source)
        self.changed.notify()
        try:
            yield replica
        finally:
            self._remove(replica, "its subscription ended")
            _stop(replica.timer)

    def _admit(self, request: adapter_pb2.AdapterUpdateRequest) -> Replica | None:
        """The place that the one who asks takes over."""
        check_names(request)
        if self.needed is None:
            raise Unavailable("the run is starting and has no adapter yet; subscribe again")
        self._check(request, needed=self.needed)
        live = self._replicas.get(request.replica_id)
        if live and live.address != request.advertised_address:
            raise AlreadyExists(
                f"replica_id: {request.replica_id!r} is subscribed from {live.address}; "
                "use a new id"
            )
        return live

    def _check(self, request: adapter_pb2.AdapterUpdateRequest, *, needed: Needed) -> None:
        address = request.advertised_address
        published = self._publisher.store.adapters()
        try:
            check_request(
                request,
                base=self._base,
                needed=replace(needed, adapters=needed.adapters.union(published)),
                sends_base=self._publisher.base is not None,
            )
        except Incompatible as error:
            if self.refused.get(address) != str(error):
                log.warning("replica at %s is refused: %s", address, error)
            self.refused[address] = str(error)
            raise
        self.refused.pop(address, None)

    def _subscription(self, request: adapter_pb2.AdapterUpdateRequest) -> Subscription:
        partial = request.partial if request.HasField("partial") else None
        others = [replica for replica in self if replica.id != request.replica_id]
        assert self.needed is not None, "admitted"
        needs_base = needs_base_first(request.capabilities, self.needed.manifest)
        lost = frozenset(request.lost_parents)
        return Subscription(
            wanted=frozenset(request.adapters),
            held=frozenset(map(ref_from_proto, request.held)),
            encodings=frozenset(request.capabilities.encodings),
            # The base comes from the trainer itself: no relay holds it.
            parent=None if needs_base else choose_parent(others, fan_out=self._fan_out, lost=lost),
            needs_base=needs_base,
            partial=(ref_from_proto(partial.ref), partial.received_bytes) if partial else None,
        )

    def _make(
        self, request: adapter_pb2.AdapterUpdateRequest, subscription: Subscription
    ) -> Replica:
        return Replica(
            id=request.replica_id,
            line=self._lines.take(request.replica_id, request.advertised_address),
            subscription=subscription,
            stream=asyncio.current_task(),
            relays=request.capabilities.relay,
            committed=self._of_this_run(subscription.held),
        )

    def holds(self, replica: Replica, held: frozenset[AdapterRef]) -> None:
        """The replica said what it has now."""
        replica.committed = self._of_this_run(held)
        self._publisher.holds(replica.subscription, held)
        self.changed.notify()

    def _of_this_run(self, held: frozenset[AdapterRef]) -> dict[tuple[str, int], AdapterRef]:
        return {(r.adapter, r.version): r for r in self._publisher.refs() if r in held}

    def renew(self, request: adapter_pb2.RenewLeaseRequest) -> float:
        """A replica's heartbeat; the seconds until the next one is due.

        Raises:
            ReplicaNotFound: it has no open subscription.
        """
        replica = self[request.replica_id]
        stall_seconds = self._publisher.pace.stall_seconds
        if replica.subscription.stalled_seconds() > stall_seconds:
            self._remove(replica, f"it took no bytes for {stall_seconds:g} s")
            raise ReplicaNotFound(f"replica_id: {replica.id!r} took no bytes; subscribe again")
        self._arm(replica)
        if request.draining and not replica.draining:
            replica.line.draining = request.reason or "shutting down"
            log.info("replica %s drains: %s", replica.id, replica.draining)
            self.changed.notify()
        return self._publisher.pace.lease_seconds

    def _arm(self, replica: Replica) -> None:
        _stop(replica.timer)
        seconds = self._publisher.pace.lease_seconds
        replica.timer = asyncio.get_running_loop().call_later(
            seconds, self._remove, replica, f"it was silent for {seconds:g} s, its lease"
        )

    def _remove(self, replica: Replica, reason: str) -> None:
        """Without effect on a replica that has left already."""
        if self._replicas.get(replica.id) is not replica:
            return
        del self._replicas[replica.id]
        self._end_stream(replica, reason)
        if not replica.draining:
            self._lost = {lost.id: lost for lost in self.lost}
            self._lost[replica.id] = LostReplica(
                id=replica.id,
                address=replica.address,
                reason=reason,
                at=time.monotonic(),
                refusals=replica.refusals,
                quarantine=replica.quarantine,
            )
            _stop(self._orphaning.get(replica.id))
            self._orphaning[replica.id] = asyncio.get_running_loop().call_later(
                self._publisher.pace.lease_seconds, self._free_children, replica
            )
        log.info("replica %s left: %s", replica.id, replica.draining or reason)
        self.changed.notify()
        self._lines.keep(replica.id, replica.line)

    def _free_children(self, lost: Replica) -> None:
        """What a relay without a trainer sends is old; unless it is back, they leave it."""
        del self._orphaning[lost.id]
        back = self._replicas.get(lost.id)
        if back and back.address == lost.address:
            return
        for child in self:
            parent = child.subscription.parent
            if parent and parent.replica_id == lost.id:
                self._remove(child, f"its relay {lost.id} was lost")

    def _end_stream(self, replica: Replica, reason: str) -> None:
        """It ends with this reason; one that is stuck in a message nobody takes is cancelled."""
        _stop(replica.timer)
        self._publisher.end(replica.subscription, reason)
        if replica.stream:
            loop = asyncio.get_running_loop()
            replica.timer = loop.call_later(_END_SECONDS, replica.stream.cancel)

    async def close(self) -> None:
        """End every membership; cut the lines of replicas that still have work."""
        for replica in self:
            self._remove(replica, "the trainer stops")
            _stop(replica.timer)
        for timer in self._orphaning.values():
            timer.cancel()
        await self._lines.close()


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer:
        timer.cancel()
