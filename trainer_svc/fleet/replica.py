"""A subscriber as the trainer sees it, and the state that follows from what it said and did."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc
from refit.v1 import adapter_pb2, rollout_pb2_grpc, trainer_pb2

from common.adapter import AdapterRef
from trainer_svc.subscription import Subscription


class State(NamedTuple):
    """A `trainer_pb2.ReplicaState`, and why."""

    state: trainer_pb2.ReplicaState
    reason: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """The update a replica refused last."""

    ref: AdapterRef
    stage: adapter_pb2.UpdateStage
    reason: str


@dataclass(frozen=True, slots=True)
class Quarantine:
    """No prompts, until a newer version is committed or, where there is one, the time is over."""

    reason: str
    until: float | None = None
    """On the event loop's clock."""


@dataclass(slots=True, eq=False)
class Replica:
    """A live subscriber."""

    id: str
    address: str
    channel: grpc.aio.Channel
    stub: rollout_pb2_grpc.RolloutServiceStub
    subscription: Subscription
    relays: bool = False
    committed: dict[tuple[str, int], AdapterRef] = field(default_factory=dict)
    """This run's versions that it holds, by adapter and version."""

    timings: adapter_pb2.UpdateTimings = field(default_factory=adapter_pb2.UpdateTimings)
    wire_bytes: int = 0
    """Bytes of messages that carried its last update."""

    canary_difference: float | None = None
    outstanding: int = 0
    refusal: Refusal | None = None
    draining: str = ""
    failures_in_a_row: int = 0
    quarantine: Quarantine | None = None
    timer: asyncio.TimerHandle | None = None
    """The end of its lease; once it has left, that of its stream."""

    stream: asyncio.Task[Any] | None = None
    """The task that sends to it."""

    def serves(self, adapter: str, version: int) -> bool:
        """Whether it holds this version or a newer one."""
        return any(name == adapter and found >= version for name, found in self.committed)

    def newest(self, adapter: str) -> int:
        """0 when it serves none."""
        return max((version for name, version in self.committed if name == adapter), default=0)

    def refused(self, adapter: str, version: int) -> bool:
        """For good: what the wire damaged comes again."""
        if self.refusal is None or self.refusal.stage == adapter_pb2.UPDATE_STAGE_WIRE:
            return False
        return (self.refusal.ref.adapter, self.refusal.ref.version) == (adapter, version)

    def takes_prompts(self) -> bool:
        return not self.draining and not self._is_quarantined()

    def state(self, newest: dict[str, int], *, max_staleness: int) -> State:
        """Its state, given the newest version of every adapter of the run."""
        if self.draining:
            return State(trainer_pb2.REPLICA_STATE_DRAINING, self.draining)
        if self.quarantine and self._is_quarantined():
            return State(trainer_pb2.REPLICA_STATE_QUARANTINED, self.quarantine.reason)
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

    def _is_quarantined(self) -> bool:
        if self.quarantine is None:
            return False
        until = self.quarantine.until
        return until is None or asyncio.get_running_loop().time() < until
