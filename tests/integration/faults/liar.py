"""A trainer that sends whatever a test tells it to, and the replica that follows it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from refit.v1 import adapter_pb2, adapter_pb2_grpc

from common.adapter import AdapterRef, Manifest
from common.grpc_server import Context, start_server
from common.stream.frames import Event
from common.wire import ref_from_proto
from tests.eventually import eventually
from tests.fake_trainer import update_events
from tests.integration.faults.processes import SECONDS, Processes, ReplicaProcess, staged
from tests.trainer_process import sized_adapter

WIDTH = 1024
CHUNK_BYTES = 8192
"""Eight chunks an update: events 1 to 8."""


@dataclass(slots=True)
class Liar(adapter_pb2_grpc.AdapterServiceServicer):
    """Sends what it is given to whoever subscribes; `streams` counts those."""

    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    reports: asyncio.Queue[adapter_pb2.ReportAdapterRequest] = field(default_factory=asyncio.Queue)
    streams: int = 0

    async def AdapterUpdate(
        self, request: adapter_pb2.AdapterUpdateRequest, context: Context
    ) -> AsyncIterator[Event]:
        # What was left over was for the stream before.
        events = self.events = asyncio.Queue[Event]()
        self.streams += 1
        yield Event(heartbeat=adapter_pb2.Heartbeat(interval_seconds=60, lease_seconds=60))
        while True:
            yield await events.get()

    async def ReportAdapter(
        self, request: adapter_pb2.ReportAdapterRequest, context: Context
    ) -> adapter_pb2.ReportAdapterResponse:
        self.reports.put_nowait(request)
        return adapter_pb2.ReportAdapterResponse()

    async def RenewLease(
        self, request: adapter_pb2.RenewLeaseRequest, context: Context
    ) -> adapter_pb2.RenewLeaseResponse:
        return adapter_pb2.RenewLeaseResponse(lease_seconds=60)


@dataclass(slots=True)
class LiedTo:
    """The liar, the replica, and the versions that were sent without a lie."""

    liar: Liar
    replica: ReplicaProcess
    fingerprint: str
    staging: Path
    refs: list[AdapterRef] = field(default_factory=list)
    spent: int = 0

    def next_update(self) -> tuple[AdapterRef, list[Event]]:
        """A version, and the events of an honest update."""
        ref, manifest, buffer = self.next_version()
        return ref, list(update_events(ref, manifest, buffer, chunk_bytes=CHUNK_BYTES))

    def next_version(self) -> tuple[AdapterRef, Manifest, memoryview]:
        self.spent += 1
        manifest, buffer = sized_adapter(self.fingerprint, seed=self.spent, width=WIDTH)
        return AdapterRef("run", "default", self.spent, manifest.digest()), manifest, buffer

    def send(self, events: list[Event]) -> None:
        for event in events:
            self.liar.events.put_nowait(event)

    async def heard(self) -> adapter_pb2.ReportAdapterRequest:
        return await asyncio.wait_for(self.liar.reports.get(), SECONDS)

    async def commit_next(self) -> None:
        """An honest update; afterwards nothing of others is left."""
        ref, events = self.next_update()
        self.refs.append(ref)
        self.send(events)
        report = await self.heard()
        assert report.outcome == adapter_pb2.OUTCOME_COMMITTED
        assert list(map(ref_from_proto, report.held)) == self.refs[-2:]
        assert await self.replica.listing() == self.refs[-2:]
        await eventually(lambda: staged(self.staging) == [len(self.refs[-2:])], seconds=SECONDS)


@asynccontextmanager
async def lied_to(processes: Processes) -> AsyncIterator[LiedTo]:
    """A replica with one honest version; it takes a megabyte at most."""
    liar = Liar()

    def register(server: grpc.aio.Server) -> None:
        adapter_pb2_grpc.add_AdapterServiceServicer_to_server(liar, server)

    server = await start_server(register, host="127.0.0.1", port=0, services=[])
    replica = await processes.replica(server.address, "max_update_bytes=1_000_000")
    await eventually(lambda: liar.streams == 1, seconds=SECONDS)
    pair = LiedTo(liar, replica, processes.fingerprint, processes.staging)
    await pair.commit_next()
    yield pair
    await server.stop(0)
