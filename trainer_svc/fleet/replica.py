"""A subscriber as the trainer sees it, and the state that follows from what it said and did."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc
from refit.v1 import adapter_pb2, rollout_pb2_grpc, trainer_pb2

from common.adapter import AdapterRef
from trainer_svc.fleet.lines import Line
from trainer_svc.subscription import Subscription


class State(NamedTuple):
    """A `trainer_pb2.ReplicaState`, and why."""

    state: trainer_pb2.ReplicaState
    reason: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """An update that a replica refused."""

    ref: AdapterRef
    stage: adapter_pb2.UpdateStage
    reason: str

    @property
    def for_good(self) -> bool:
        """What the wire damaged comes again."""
        return self.stage != adapter_pb2.UPDATE_STAGE_WIRE


@dataclass(slots=True, eq=False)
class Quarantine:
    """No prompts, until it serves newer versions or, where there is one, the time is over."""

    reason: str
    newest: Mapping[str, int]
    """The version of each adapter that it served last when it began."""

    timed: bool = False
    over: bool = False


@dataclass(slots=True, eq=False)
class Replica:
    """A live subscriber."""

    id: str
    line: Line
    subscription: Subscription
    relays: bool = False
    committed: dict[tuple[str, int], AdapterRef] = field(default_factory=dict)
    """This run's versions that it holds, by adapter and version; never changed in place."""

    timings: adapter_pb2.UpdateTimings = field(default_factory=adapter_pb2.UpdateTimings)
    wire_bytes: int = 0
    """Bytes of messages that carried its last update."""

    canary_difference: float | None = None
    refusals: dict[str, Refusal] = field(default_factory=dict)
    """The last one of each adapter, the latest last; never changed in place."""

    quarantine: Quarantine | None = None
    timer: asyncio.TimerHandle | None = None
    """The end of its lease; once it has left, that of its stream."""

    stream: asyncio.Task[Any] | None = None
    """The task that sends to it."""

    @property
    def address(self) -> str:
        return self.line.address

    @property
    def channel(self) -> grpc.aio.Channel:
        return self.line.channel

    @property
    def stub(self) -> rollout_pb2_grpc.RolloutServiceStub:
        return self.line.stub

    @property
    def outstanding(self) -> int:
        return self.line.outstanding

    @property
    def draining(self) -> str:
        return self.line.draining

    @property
    def refusal(self) -> Refusal | None:
        """The last one, unless it serves that version or a newer one by now."""
        return next(reversed(self._refusals()), None)

    def serves(self, adapter: str, version: int) -> bool:
        """Whether it holds this version or a newer one."""
        return any(name == adapter and found >= version for name, found in self.committed)

    def newest(self, adapter: str) -> int:
        """0 when it serves none."""
        return max((version for name, version in self.committed if name == adapter), default=0)

    def refused(self, adapter: str, version: int) -> bool:
        """For good: what the wire damaged comes again."""
        return any(
            refusal.for_good and (refusal.ref.adapter, refusal.ref.version) == (adapter, version)
            for refusal in self._refusals()
        )

    def takes_prompts(self, adapter: str) -> bool:
        """Those for an adapter whose version it refused go elsewhere, the others come."""
        refused = any(r.for_good and r.ref.adapter == adapter for r in self._refusals())
        return not (self.draining or self.is_quarantined() or refused)

    def passes_on(self) -> bool:
        """Whether others may take their bytes from it."""
        refused = any(refusal.for_good for refusal in self._refusals())
        return self.relays and not (self.draining or self.is_quarantined() or refused)

    def state(self, newest: dict[str, int], *, max_staleness: int) -> State:
        """Its state, given the newest version of every adapter of the run."""
        if self.draining:
            return State(trainer_pb2.REPLICA_STATE_DRAINING, self.draining)
        if self.quarantine and self.is_quarantined():
            return State(trainer_pb2.REPLICA_STATE_QUARANTINED, self.quarantine.reason)
        for refusal in self._refusals():
            if refusal.for_good:
                reason = f"refused {refusal.ref}: {refusal.reason}"
                return State(trainer_pb2.REPLICA_STATE_QUARANTINED, reason)
        wanted = {name: v for name, v in newest.items() if self.subscription.wants(name)}
        if not self.committed:
            names = ", ".join(f"{name}@{version}" for name, version in wanted.items())
            return State(trainer_pb2.REPLICA_STATE_JOINING, f"receives {names or 'nothing yet'}")
        behind = [
            f"{name}@{self.newest(name)} of {version}"
            for name, version in wanted.items()
            if self.newest(name) < version - max_staleness
        ]
        if behind:
            return State(trainer_pb2.REPLICA_STATE_CATCHING_UP, f"serves {', '.join(behind)}")
        return State(trainer_pb2.REPLICA_STATE_READY, "serves what the run asks for")

    def is_quarantined(self, *, for_good: bool = False) -> bool:
        """Whether it gets no prompt at all; `for_good` leaves out what time ends."""
        found = self.quarantine
        if found is None or found.over or (for_good and found.timed):
            return False
        return all(self.newest(adapter) <= version for adapter, version in found.newest.items())

    def _refusals(self) -> list[Refusal]:
        """Those that no later commit of the same adapter has made void."""
        found = self.refusals.values()
        return [r for r in found if not self.serves(r.ref.adapter, r.ref.version)]
