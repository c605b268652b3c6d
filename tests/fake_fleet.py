"""A fleet without subscriptions: its replicas are given by hand, and answer over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field

import grpc
from refit.v1 import adapter_pb2, rollout_pb2_grpc

from common.adapter import AdapterRef, Manifest
from common.grpc_server import connect, start_server
from common.rules import Rules
from common.signal import Signal


@dataclass(slots=True)
class FakeReplica:
    """What the loop and the sampler read of a replica."""

    id: str
    channel: grpc.aio.Channel
    stub: rollout_pb2_grpc.RolloutServiceStub
    committed: dict[tuple[str, int], AdapterRef]
    timings: adapter_pb2.UpdateTimings = field(default_factory=adapter_pb2.UpdateTimings)
    wire_bytes: int = 0
    canary_difference: float | None = None
    outstanding: int = 0
    takes_prompts: bool = True

    def serves(self, adapter: str, version: int) -> bool:
        return any(name == adapter and found >= version for name, found in self.committed)


class FakeFleet:
    """Dispatch like the real one's; `heard` is what was said of the replicas, in order."""

    def __init__(self) -> None:
        self.replicas: list[FakeReplica] = []
        self.max_staleness = 0
        self.required = (Rules(), frozenset[str]())
        """Rules and adapters that were asked for last."""

        self.heard: list[tuple[str, str]] = []
        self.changed = Signal()

    def require(self, manifest: Manifest, *, rules: Rules, adapters: Iterable[str]) -> None:
        self.required = (rules, frozenset(adapters))

    def answered(self, replica: FakeReplica) -> None:
        self.heard.append(("answered", replica.id))

    def failed(self, replica: FakeReplica, reason: str) -> None:
        self.heard.append((f"failed: {reason}", replica.id))

    def quarantine(self, replica: FakeReplica, reason: str) -> None:
        self.heard.append((f"quarantine: {reason}", replica.id))
        replica.takes_prompts = False

    async def wait_for(
        self,
        adapter: str,
        version: int,
        *,
        replicas: int,
        timeout_seconds: float,
        straggler_seconds: float,
    ) -> list[FakeReplica]:
        return [replica for replica in self.replicas if replica.serves(adapter, version)]

    async def wait_for_any(
        self, adapter: str, version: int, *, avoid: frozenset[str], timeout_seconds: float
    ) -> bool:
        return await self.changed.wait_until(
            lambda: bool(self._ready(adapter, version, avoid)), timeout_seconds=timeout_seconds
        )

    @contextlib.contextmanager
    def leased(self, adapter: str, version: int, *, avoid: frozenset[str]) -> Iterator[FakeReplica]:
        replica = min(self._ready(adapter, version, avoid), key=lambda r: r.outstanding)
        replica.outstanding += 1
        try:
            yield replica
        finally:
            replica.outstanding -= 1

    def _ready(self, adapter: str, version: int, avoid: frozenset[str]) -> list[FakeReplica]:
        return [
            replica
            for replica in self.replicas
            if replica.takes_prompts
            and replica.id not in avoid
            and replica.serves(adapter, version)
        ]


@contextlib.asynccontextmanager
async def fake_fleet(
    *servicers: rollout_pb2_grpc.RolloutServiceServicer, held: AdapterRef | None = None
) -> AsyncIterator[FakeFleet]:
    """A fleet of these, named r0, r1, ... in order; each holds `held`."""
    fleet = FakeFleet()
    async with contextlib.AsyncExitStack() as stack:
        for number, servicer in enumerate(servicers):
            server = await start_server(
                functools.partial(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, servicer),
                host="127.0.0.1",
                port=0,
                services=[],
            )
            stack.push_async_callback(server.stop, 0)
            channel = connect(server.address)
            stack.push_async_callback(channel.close)
            stub = rollout_pb2_grpc.RolloutServiceStub(channel)
            committed = {(held.adapter, held.version): held} if held else {}
            fleet.replicas.append(FakeReplica(f"r{number}", channel, stub, committed))
        async with asyncio.timeout(30):
            yield fleet
