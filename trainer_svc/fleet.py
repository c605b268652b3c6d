"""The replicas that subscribed: who they are, what they serve, and which one takes a prompt."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc
from refit.v1 import adapter_pb2, rollout_pb2_grpc

from common.adapter import AdapterRef, Manifest
from common.errors import (
    AlreadyExists,
    CorruptUpdate,
    Incompatible,
    InvalidField,
    ReplicaNotFound,
    Unavailable,
    WaitExpired,
)
from common.grpc_server import connect
from common.model_dir import BaseModel
from common.signal import Signal
from common.wire import dtype_from_proto, ref_from_proto

log = logging.getLogger(__name__)

_CLOSE_GRACE_SECONDS = 60.0


@dataclass(slots=True)
class Replica:
    """A live subscriber."""

    id: str
    address: str
    channel: grpc.aio.Channel
    stub: rollout_pb2_grpc.RolloutServiceStub
    wanted: frozenset[str]
    committed: dict[tuple[str, int], AdapterRef] = field(default_factory=dict)
    timings: adapter_pb2.UpdateTimings = field(default_factory=adapter_pb2.UpdateTimings)
    outstanding: int = 0
    refused: tuple[str, int] | None = None
    refusal: str = ""

    def wants(self, adapter: str) -> bool:
        return not self.wanted or adapter in self.wanted

    def serves(self, adapter: str, version: int) -> bool:
        return any(name == adapter and found >= version for name, found in self.committed)


class Fleet:
    """Registration by subscription; dispatch to the least busy replica that has the version."""

    def __init__(self, base: BaseModel, *, published: Callable[[], list[AdapterRef]]) -> None:
        self._base = base
        self._published = published
        self._needed: Manifest | None = None
        self._replicas: dict[str, Replica] = {}
        self._changed = Signal()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def replicas(self) -> list[Replica]:
        return list(self._replicas.values())

    def require(self, manifest: Manifest) -> None:
        """From now on, replicas that cannot load an adapter like this one are refused."""
        self._needed = manifest

    @contextlib.contextmanager
    def joined(self, request: adapter_pb2.AdapterUpdateRequest) -> Iterator[Replica]:
        """Membership for as long as the subscription is open.

        Raises:
            InvalidField, AlreadyExists: the request is malformed, or its id in use.
            Incompatible: with every reason why the replica cannot serve this run.
        """
        self._admit(request)
        channel = connect(request.advertised_address)
        replica = Replica(
            request.replica_id,
            request.advertised_address,
            channel,
            rollout_pb2_grpc.RolloutServiceStub(channel),
            frozenset(request.adapters),
        )
        for ref in map(ref_from_proto, request.held):
            if ref in self._published():
                replica.committed[ref.adapter, ref.version] = ref
        self._replicas[replica.id] = replica
        log.info("replica %s joined from %s", replica.id, replica.address)
        self._changed.notify()
        try:
            yield replica
        finally:
            del self._replicas[replica.id]
            log.info("replica %s left", replica.id)
            self._changed.notify()
            # Running generations end by themselves; a close without grace would cancel them here.
            task = asyncio.ensure_future(_close(channel))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _admit(self, request: adapter_pb2.AdapterUpdateRequest) -> None:
        if not request.replica_id:
            raise InvalidField("replica_id: empty; give an id that is new with every start")
        host, _, port = request.advertised_address.rpartition(":")
        if not host or not port.isdigit():
            raise InvalidField(
                f"advertised_address: {request.advertised_address!r}; give host:port as the "
                "trainer can reach it"
            )
        if request.replica_id in self._replicas:
            raise AlreadyExists(
                f"replica_id: {request.replica_id!r} has a live subscription; use a new id"
            )
        if self._needed is None:
            raise Unavailable("the run is starting and has no adapter yet; subscribe again")
        if reasons := list(self._mismatches(request, self._needed)):
            log.warning("refused replica %s: %s", request.replica_id, "; ".join(reasons))
            raise Incompatible("; ".join(reasons))

    def _mismatches(
        self, request: adapter_pb2.AdapterUpdateRequest, needed: Manifest
    ) -> Iterator[str]:
        base, can = request.base_model, request.capabilities
        if base.fingerprint != self._base.fingerprint:
            yield (
                f"base_model: the replica has {base.name!r} (fingerprint {base.fingerprint!r}), "
                f"the run trains {self._base.name!r} (fingerprint {self._base.fingerprint!r}); "
                "load the same model on both"
            )
        if can.max_rank < needed.lora.rank:
            yield (
                f"capabilities.max_rank: {can.max_rank} on the replica, the run's adapters have "
                f"rank {needed.lora.rank}; raise max_lora_rank there"
            )
        if missing := sorted(set(needed.lora.target_modules) - set(can.target_modules)):
            yield f"capabilities.target_modules: the replica cannot adapt {', '.join(missing)}"
        taken = {dtype_from_proto(d, field="capabilities.dtypes") for d in can.dtypes}
        if unknown := sorted({t.dtype.value for t in needed.tensors if t.dtype not in taken}):
            yield f"capabilities.dtypes: the replica does not take {', '.join(unknown)}"

    def report(self, request: adapter_pb2.ReportAdapterRequest) -> None:
        """Take a replica's word on an update.

        Raises:
            ReplicaNotFound: it has no open subscription.
            InvalidField: it committed what was never published.
            CorruptUpdate: it committed other bytes than were published.
        """
        replica = self._replicas.get(request.replica_id)
        if replica is None:
            raise ReplicaNotFound(f"replica_id: {request.replica_id!r} is not subscribed; do so")
        ref = ref_from_proto(request.ref)
        if request.outcome == adapter_pb2.OUTCOME_REFUSED:
            replica.refused, replica.refusal = (ref.adapter, ref.version), request.reason
            log.error("replica %s refused %s: %s", replica.id, ref, request.reason)
        elif request.outcome == adapter_pb2.OUTCOME_COMMITTED:
            self._committed(replica, ref, request.timings)
        else:
            raise InvalidField(f"outcome: {request.outcome}; say COMMITTED or REFUSED")
        self._changed.notify()

    def _committed(
        self, replica: Replica, ref: AdapterRef, timings: adapter_pb2.UpdateTimings
    ) -> None:
        published = {(kept.adapter, kept.version): kept for kept in self._published()}
        newest = max((v for name, v in published if name == ref.adapter), default=0)
        expected = published.get((ref.adapter, ref.version))
        if expected is None and ref.version > newest:
            raise InvalidField(f"ref: {ref} was never published; report what this trainer sent")
        if expected is not None and expected != ref:
            replica.refused = ref.adapter, ref.version
            replica.refusal = f"committed {ref}, published was {expected}"
            raise CorruptUpdate(replica.refusal)
        replica.refused, replica.refusal = None, ""
        replica.timings = timings
        held = {**replica.committed, (ref.adapter, ref.version): ref}
        # What was retired meanwhile no longer counts.
        replica.committed = {key: r for key, r in held.items() if key in published}

    async def wait_for(
        self,
        adapter: str,
        version: int,
        *,
        replicas: int,
        timeout_seconds: float,
        straggler_seconds: float,
    ) -> list[Replica]:
        """Wait until so many replicas serve the version, then a little for the others.

        A replica that refused the version, never wanted the adapter, or left, is not waited for.

        Raises:
            WaitExpired: fewer have it when the time is over; each one's state is named.
        """

        def enough() -> bool:
            return len(self._ready(adapter, version)) >= replicas

        def settled() -> bool:
            ready = self._ready(adapter, version)
            return all(
                r in ready or r.refused == (adapter, version) or not r.wants(adapter)
                for r in self.replicas
            )

        if not await self._changed.wait_until(enough, timeout_seconds=timeout_seconds):
            raise WaitExpired(self._why_not(adapter, version, replicas))
        await self._changed.wait_until(settled, timeout_seconds=straggler_seconds)
        return self._ready(adapter, version)

    def _ready(self, adapter: str, version: int) -> list[Replica]:
        return [replica for replica in self.replicas if replica.serves(adapter, version)]

    def _why_not(self, adapter: str, version: int, needed: int) -> str:
        states = [f"{r.id}: {r.refusal or 'has not committed it'}" for r in self.replicas]
        return (
            f"{adapter}@{version}: {needed} replicas must serve it, "
            f"{len(self._ready(adapter, version))} do; "
            f"{'; '.join(states) or 'none is subscribed, start `refit rollout`'}"
        )

    async def wait_for_any(
        self, adapter: str, version: int, *, avoid: frozenset[str], timeout_seconds: float
    ) -> bool:
        """Whether, in time, a replica outside `avoid` serves the version."""
        return await self._changed.wait_until(
            lambda: any(r.id not in avoid for r in self._ready(adapter, version)),
            timeout_seconds=timeout_seconds,
        )

    @contextlib.contextmanager
    def leased(self, adapter: str, version: int, *, avoid: frozenset[str]) -> Iterator[Replica]:
        """The least busy replica that serves the version, counted as busier while in use."""
        ready = [r for r in self._ready(adapter, version) if r.id not in avoid]
        replica = min(ready, key=lambda r: r.outstanding)
        replica.outstanding += 1
        try:
            yield replica
        finally:
            replica.outstanding -= 1

    async def close(self) -> None:
        """Cut the channels of replicas that left and still had work."""
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)


async def _close(channel: grpc.aio.Channel) -> None:
    await channel.close(_CLOSE_GRACE_SECONDS)
