"""A gRPC server and its channels, set up the one way both services use.

Health, reflection, keepalive and the mapping of errors live here, so that servicers only translate.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.errors import ConfigError, RefitError

log = logging.getLogger(__name__)

_SERVER_OPTIONS = [
    # A peer whose machine is gone is noticed within 40 s, though nothing closes its connection.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # With port sharing on, a second server would bind the same port in silence.
    ("grpc.so_reuseport", 0),
    # The default answers a client's 30 s keepalive with too_many_pings.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
]
_CHANNEL_OPTIONS = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""What a servicer's methods get beside the request."""


class GrpcServer:
    """A listening server with health and reflection.

    Health knows two names: "" says that the process answers, a service's own name that it is ready
    for traffic. Everything but "" begins as NOT_SERVING.
    """

    def __init__(
        self, server: grpc.aio.Server, health_servicer: Any, *, host: str, port: int
    ) -> None:
        self._server = server
        self._health = health_servicer
        self.host = host
        self.port = port

    @property
    def address(self) -> str:
        """host:port, the port as the system chose it."""
        return f"{self.host}:{self.port}"

    async def set_serving(self, service: str, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)

    async def announce_shutdown(self) -> None:
        """Report NOT_SERVING for every service, for good."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, and cancel those that run once the grace is over."""
        await self._server.stop(grace_seconds)


async def start_server(
    register: Callable[[grpc.aio.Server], None], *, host: str, port: int, services: Sequence[str]
) -> GrpcServer:
    """Bind and start. `register` adds the servicers; `services` are their full names.

    Raises:
        ConfigError: the address cannot be bound.
    """
    server = grpc.aio.server(interceptors=[_ErrorInterceptor()], options=_SERVER_OPTIONS)
    register(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection(
        [*services, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ConfigError(
            f"port: {host}:{port} cannot be bound; another process listens there, or the host is "
            "not this machine's; choose another, or 0 for a free one"
        ) from error
    await server.start()
    running = GrpcServer(server, health_servicer, host=host, port=bound)
    await running.set_serving("", True)
    for service in services:
        await running.set_serving(service, False)
    return running


def connect(address: str) -> grpc.aio.Channel:
    """A channel with keepalive that notices a dead peer within 40 seconds."""
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)


class _ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns domain errors into their status; any other into INTERNAL with a fixed text."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        coders = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _mapped_stream(handler.unary_stream), *coders
            )
        return grpc.unary_unary_rpc_method_handler(_mapped_unary(handler.unary_unary), *coders)


def _mapped_unary(method: Callable[..., Any]) -> Callable[..., Any]:
    async def call(request: Any, context: Context) -> Any:
        async with _mapped(context):
            return await method(request, context)

    return call


def _mapped_stream(method: Callable[..., Any]) -> Callable[..., Any]:
    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        async with _mapped(context), contextlib.aclosing(method(request, context)) as responses:
            async for response in responses:
                yield response

    return call


@contextlib.asynccontextmanager
async def _mapped(context: Context) -> AsyncIterator[None]:
    try:
        yield
    except RefitError as error:
        await _abort(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception:
        log.exception("a call failed in a way nobody foresaw")
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; see the server's log")


async def _abort(context: Context, error: RefitError) -> NoReturn:
    """End the call with the error's status and a machine-readable `ErrorInfo`."""
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=type(error).__name__, domain="refit.v1"))
    status = status_pb2.Status(code=error.code.value[0], message=str(error), details=[info])
    await context.abort(
        error.code,
        str(error),
        trailing_metadata=(("grpc-status-details-bin", status.SerializeToString()),),
    )
    raise AssertionError("abort always raises")
