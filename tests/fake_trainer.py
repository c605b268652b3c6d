"""The trainer's AdapterService, as simple as a test wants it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from refit.v1 import adapter_pb2, adapter_pb2_grpc

from common.adapter import AdapterRef, Canary, Manifest
from common.errors import Incompatible
from common.grpc_server import Context, start_server
from common.stream import sender
from common.stream.content import Content
from common.stream.frames import Event
from common.stream.sender import Pace, Receiver
from common.wire import CHUNK_BYTES, PAGE_TENSORS, crc32c, manifest_to_proto, ref_to_proto
from tests.messages import as_event


def update_events(
    ref: AdapterRef,
    manifest: Manifest,
    buffer: memoryview,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    page_tensors: int = PAGE_TENSORS,
    canary: Canary | None = None,
) -> Iterator[Event]:
    """One whole update, every byte as it is."""
    first, more = manifest_to_proto(ref, manifest, canary=canary, page_tensors=page_tensors)
    yield Event(manifest=first)
    for tensors in more:
        yield Event(tensors=tensors)
    for begin in range(0, len(buffer), chunk_bytes):
        yield raw_chunk(begin, bytes(buffer[begin : begin + chunk_bytes]))
    yield Event(commit=adapter_pb2.AdapterCommit(ref=ref_to_proto(ref)))


def raw_chunk(begin: int, data: bytes) -> Event:
    chunk = adapter_pb2.AdapterChunk(offset_bytes=begin, data=data, crc32c=crc32c(data))
    return Event(chunk=chunk)


async def sent_events(
    content: Content, receiver: Receiver, *, chunk_bytes: int = CHUNK_BYTES
) -> list[Event]:
    """One whole update as the real sender encodes it for `receiver`."""
    pace = Pace(chunk_bytes=chunk_bytes)
    return [as_event(m) async for m in sender.update_events(content, receiver, pace=pace)]


@dataclass(slots=True)
class FakeTrainer(adapter_pb2_grpc.AdapterServiceServicer):
    """Sends `events` to each subscriber; then ends the stream, or keeps it open and silent.

    A subscriber that is not the first gets `later` instead, where there is one for it.
    """

    events: list[Event]
    keep_open: bool = True
    refusal: str = ""
    later: list[list[Event]] = field(default_factory=list)
    subscriptions: list[adapter_pb2.AdapterUpdateRequest] = field(default_factory=list)
    reports: list[adapter_pb2.ReportAdapterRequest] = field(default_factory=list)
    renewals: list[adapter_pb2.RenewLeaseRequest] = field(default_factory=list)
    may_send: asyncio.Event = field(default_factory=asyncio.Event)
    streams: int = 0
    _end: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_send.set()

    def end_streams(self) -> None:
        """Those that are open now; later ones stay open."""
        self._end.set()
        self._end = asyncio.Event()

    async def AdapterUpdate(
        self, request: adapter_pb2.AdapterUpdateRequest, context: Context
    ) -> AsyncIterator[Event]:
        number, end = len(self.subscriptions), self._end
        self.subscriptions.append(request)
        if self.refusal:
            raise Incompatible(self.refusal)
        self.streams += 1
        try:
            await self.may_send.wait()
            for event in [self.events, *self.later][min(number, len(self.later))]:
                yield event
            if self.keep_open:
                await end.wait()
        finally:
            self.streams -= 1

    async def ReportAdapter(
        self, request: adapter_pb2.ReportAdapterRequest, context: Context
    ) -> adapter_pb2.ReportAdapterResponse:
        self.reports.append(request)
        return adapter_pb2.ReportAdapterResponse()

    async def RenewLease(
        self, request: adapter_pb2.RenewLeaseRequest, context: Context
    ) -> adapter_pb2.RenewLeaseResponse:
        self.renewals.append(request)
        return adapter_pb2.RenewLeaseResponse(lease_seconds=0.06)


@asynccontextmanager
async def serving(servicer: adapter_pb2_grpc.AdapterServiceServicer) -> AsyncIterator[str]:
    """The address of a server that stands inside the block."""

    def register(server: grpc.aio.Server) -> None:
        adapter_pb2_grpc.add_AdapterServiceServicer_to_server(servicer, server)

    server = await start_server(register, host="127.0.0.1", port=0, services=[])
    try:
        yield server.address
    finally:
        await server.stop(0)
