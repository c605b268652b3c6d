"""The server every service runs on: health, reflection, errors as statuses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from refit.v1 import rollout_pb2, rollout_pb2_grpc

from common.errors import AdapterNotFound, ConfigError, Unavailable
from common.grpc_server import Context, GrpcServer, connect, start_server

SERVICE = "refit.v1.RolloutService"


class Servicer(rollout_pb2_grpc.RolloutServiceServicer):
    async def ListAdapters(
        self, request: rollout_pb2.RolloutServiceListAdaptersRequest, context: Context
    ) -> rollout_pb2.RolloutServiceListAdaptersResponse:
        raise ValueError("a secret")

    async def ResumeGeneration(
        self, request: rollout_pb2.ResumeGenerationRequest, context: Context
    ) -> rollout_pb2.ResumeGenerationResponse:
        raise Unavailable("the engine is starting; try again")

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        yield rollout_pb2.GenerateResponse(index=1)
        raise AdapterNotFound("adapter: no such")

    async def PauseGeneration(
        self, request: rollout_pb2.PauseGenerationRequest, context: Context
    ) -> rollout_pb2.PauseGenerationResponse:
        raise ConfigError("tls_key: /etc/secret.key cannot be read")


@pytest.fixture
async def server() -> AsyncIterator[GrpcServer]:
    running = await start_server(
        lambda s: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(Servicer(), s),
        host="127.0.0.1",
        port=0,
        services=[SERVICE],
    )
    yield running
    await running.stop(0)


async def test_a_domain_error_has_its_status_and_a_machine_readable_reason(
    server: GrpcServer,
) -> None:
    async with connect(server.address) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ResumeGeneration(rollout_pb2.ResumeGenerationRequest(), timeout=5)

    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "the engine is starting; try again"
    status = status_pb2.Status.FromString(_trailing(caught.value, "grpc-status-details-bin"))
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("Unavailable", "refit.v1")


def _trailing(error: grpc.aio.AioRpcError, key: str) -> bytes:
    value = dict(error.trailing_metadata())[key]
    assert isinstance(value, bytes)
    return value


async def test_an_unforeseen_error_tells_the_peer_nothing(server: GrpcServer) -> None:
    async with connect(server.address) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListAdapters(rollout_pb2.RolloutServiceListAdaptersRequest(), timeout=5)

    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert caught.value.details() == "internal error; see the server's log"


async def test_a_wrong_configuration_is_not_the_callers_fault_and_none_of_its_business(
    server: GrpcServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect(server.address) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.PauseGeneration(rollout_pb2.PauseGenerationRequest(), timeout=5)

    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    text = "this service's configuration cannot be used; see its log"
    assert caught.value.details() == text
    assert "/etc/secret.key" in caplog.text


async def test_an_error_in_a_stream_comes_after_what_was_sent(server: GrpcServer) -> None:
    async with connect(server.address) as channel:
        call = rollout_pb2_grpc.RolloutServiceStub(channel).Generate(
            rollout_pb2.GenerateRequest(), timeout=5
        )
        first = await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()

    assert first.index == 1
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_health_tells_alive_from_ready(server: GrpcServer) -> None:
    async def check(service: str) -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        return int((await stub.Check(request, timeout=5)).status)

    status = health_pb2.HealthCheckResponse
    async with connect(server.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        assert await check("") == status.SERVING
        assert await check(SERVICE) == status.NOT_SERVING
        await server.set_serving(SERVICE, True)
        assert await check(SERVICE) == status.SERVING
        await server.announce_shutdown()
        assert await check(SERVICE) == status.NOT_SERVING


async def test_a_watch_of_health_sees_the_change(server: GrpcServer) -> None:
    status = health_pb2.HealthCheckResponse
    async with connect(server.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        call = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=5)
        try:
            assert (await call.read()).status == status.NOT_SERVING
            await server.set_serving(SERVICE, True)
            assert (await call.read()).status == status.SERVING
        finally:
            call.cancel()


async def test_a_port_in_use_is_one_clear_error(server: GrpcServer) -> None:
    with pytest.raises(ConfigError, match=f"port: 127.0.0.1:{server.port} cannot be bound"):
        await start_server(lambda s: None, host="127.0.0.1", port=server.port, services=[])
