"""The trainer's AdapterService, as simple as a test wants it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from refit.v1 import adapter_pb2, adapter_pb2_grpc

from common.adapter import AdapterRef, Manifest
from common.errors import Incompatible
from common.grpc_server import Context
from common.wire import CHUNK_BYTES
from trainer_svc import publisher
from trainer_svc.publisher import PublishedVersion

Event = adapter_pb2.AdapterUpdateResponse


def update_events(
    ref: AdapterRef, manifest: Manifest, buffer: memoryview, *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[Event]:
    """One whole update, as the real trainer sends it."""
    version = PublishedVersion(ref, manifest, buffer)
    return publisher.update_events(version, chunk_bytes=chunk_bytes)


@dataclass(slots=True)
class FakeTrainer(adapter_pb2_grpc.AdapterServiceServicer):
    """Sends `events` to each subscriber; then ends the stream, or keeps it open and silent."""

    events: list[Event]
    keep_open: bool = True
    refusal: str = ""
    subscriptions: list[adapter_pb2.AdapterUpdateRequest] = field(default_factory=list)
    reports: list[adapter_pb2.ReportAdapterRequest] = field(default_factory=list)
    may_send: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_send.set()

    async def AdapterUpdate(
        self, request: adapter_pb2.AdapterUpdateRequest, context: Context
    ) -> AsyncIterator[Event]:
        self.subscriptions.append(request)
        if self.refusal:
            raise Incompatible(self.refusal)
        await self.may_send.wait()
        for event in self.events:
            yield event
        if self.keep_open:
            await asyncio.Event().wait()

    async def ReportAdapter(
        self, request: adapter_pb2.ReportAdapterRequest, context: Context
    ) -> adapter_pb2.ReportAdapterResponse:
        self.reports.append(request)
        return adapter_pb2.ReportAdapterResponse()
