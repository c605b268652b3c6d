"""A server with both services, behind whatever security a test asks for, and its clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from refit.v1 import adapter_pb2, adapter_pb2_grpc, rollout_pb2, rollout_pb2_grpc

from common.grpc_server import Context, GrpcServer, connect, start_server
from common.security import SecuritySettings

SERVICE = "refit.v1.RolloutService"
ADAPTERS = "refit.v1.AdapterService"
GENERATE_TOKEN = "generate-0123456789"
SUBSCRIBE_TOKEN = "subscribe-0123456789"
ADMIN_TOKEN = "admin-0123456789"


class Rollout(rollout_pb2_grpc.RolloutServiceServicer):
    async def ListAdapters(
        self, request: rollout_pb2.RolloutServiceListAdaptersRequest, context: Context
    ) -> rollout_pb2.RolloutServiceListAdaptersResponse:
        return rollout_pb2.RolloutServiceListAdaptersResponse()

    async def ResumeGeneration(
        self, request: rollout_pb2.ResumeGenerationRequest, context: Context
    ) -> rollout_pb2.ResumeGenerationResponse:
        return rollout_pb2.ResumeGenerationResponse()

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        yield rollout_pb2.GenerateResponse(index=len(request.text))


class Adapters(adapter_pb2_grpc.AdapterServiceServicer):
    """Streams one chunk of so many bytes as the replica id says, and then waits."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def AdapterUpdate(
        self, request: adapter_pb2.AdapterUpdateRequest, context: Context
    ) -> AsyncIterator[adapter_pb2.AdapterUpdateResponse]:
        chunk = adapter_pb2.AdapterChunk(data=bytes(int(request.replica_id)), crc32c=1)
        try:
            yield adapter_pb2.AdapterUpdateResponse(chunk=chunk)
            await asyncio.Event().wait()
        finally:
            self.ended.set()


@contextlib.asynccontextmanager
async def serving(
    security: SecuritySettings,
    *,
    adapters: Adapters | None = None,
    plaintext_health_port: int | None = None,
) -> AsyncIterator[GrpcServer]:
    def register(server: grpc.aio.Server) -> None:
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(Rollout(), server)
        adapter_pb2_grpc.add_AdapterServiceServicer_to_server(adapters or Adapters(), server)

    running = await start_server(
        register,
        host="127.0.0.1",
        port=0,
        services=[SERVICE, ADAPTERS],
        security=security,
        plaintext_health_port=plaintext_health_port,
    )
    try:
        yield running
    finally:
        await running.stop(0)


async def list_adapters(address: str, security: SecuritySettings | None) -> None:
    async with connect(address, security) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        await stub.ListAdapters(rollout_pb2.RolloutServiceListAdaptersRequest(), timeout=5)


async def resume(address: str, security: SecuritySettings) -> None:
    async with connect(address, security) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        await stub.ResumeGeneration(rollout_pb2.ResumeGenerationRequest(), timeout=5)


async def generate(address: str, security: SecuritySettings) -> int:
    async with connect(address, security) as channel:
        call = rollout_pb2_grpc.RolloutServiceStub(channel).Generate(
            rollout_pb2.GenerateRequest(text="four"), timeout=5
        )
        indices = [int(response.index) async for response in call]
    return indices[0]


async def check_health(address: str, security: SecuritySettings | None) -> int:
    async with connect(address, security) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
    return int(answer.status)


def presenting(tmp_path: Path, token: str) -> SecuritySettings:
    path = tmp_path / "token"
    path.write_text(f"{token}\n")
    return SecuritySettings(token_file=path)
