"""A gRPC server and its channels, set up the one way both services use.

Health, reflection, keepalive, limits, TLS and tokens live here, so that servicers only translate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.errors import ConfigError
from common.interceptors import Context as Context
from common.interceptors import ErrorInterceptor, TokenInterceptor
from common.security import PLAINTEXT, SecuritySettings
from common.token_channel import TokenChannel
from common.tokens import TokenBook
from common.wire import MAX_CHUNK_BYTES

MAX_MESSAGE_BYTES = MAX_CHUNK_BYTES + (64 << 10)
"""Largest message that either side takes: the largest chunk, 4 MiB, and the fields around it. What
grows with the model travels in several messages, so nothing larger is ever right."""

_SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer whose machine is gone is noticed within 40 s, though nothing closes its connection.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # With port sharing on, a second server would bind the same port in silence.
    ("grpc.so_reuseport", 0),
    # The default answers a client's 30 s keepalive with too_many_pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]
_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


class GrpcServer:
    """A listening server with health and reflection.

    Health knows two names: "" says that the process answers, a service's own name that it is ready
    for traffic. Everything but "" begins as NOT_SERVING.

    Args:
        servers: they are stopped together.
        health_servicer: what all of them answer health checks with.
        host, port: where the first one listens.
        plaintext_health_port: where a second one answers health alone; None: there is none.
    """

    def __init__(
        self,
        servers: Sequence[grpc.aio.Server],
        health_servicer: Any,
        *,
        host: str,
        port: int,
        plaintext_health_port: int | None,
    ) -> None:
        self._servers = servers
        self._health = health_servicer
        self.host = host
        self.port = port
        self.plaintext_health_port = plaintext_health_port

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
        await asyncio.gather(*(server.stop(grace_seconds) for server in self._servers))


async def start_server(
    register: Callable[[grpc.aio.Server], None],
    *,
    host: str,
    port: int,
    services: Sequence[str],
    security: SecuritySettings = PLAINTEXT,
    plaintext_health_port: int | None = None,
) -> GrpcServer:
    """Bind and start.

    Args:
        register: adds the servicers.
        host, port: where to listen; port 0 lets the system choose.
        services: full names of what `register` adds.
        security: TLS, and the tokens that calls need; health needs none.
        plaintext_health_port: a second port that answers health alone, without TLS: Kubernetes'
            probes show no certificate. 0 lets the system choose.

    Raises:
        ConfigError: an address cannot be bound, or a file of `security` cannot be used.
    """
    security.check()
    health_servicer = health.aio.HealthServicer()
    server = _server(register, services, security.tokens(), health_servicer)
    bound = _bind(server, "port", host, port, security.server_credentials())
    servers = [server]
    if plaintext_health_port is not None:
        servers.append(_health_server(health_servicer))
        plaintext_health_port = _bind(
            servers[-1], "plaintext_health_port", host, plaintext_health_port
        )
    for each in servers:
        await each.start()
    running = GrpcServer(
        servers,
        health_servicer,
        host=host,
        port=bound,
        plaintext_health_port=plaintext_health_port,
    )
    await running.set_serving("", True)
    for service in services:
        await running.set_serving(service, False)
    return running


def _health_server(health_servicer: Any) -> grpc.aio.Server:
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    return server


def _server(
    register: Callable[[grpc.aio.Server], None],
    services: Sequence[str],
    tokens: TokenBook | None,
    health_servicer: Any,
) -> grpc.aio.Server:
    interceptors: list[grpc.aio.ServerInterceptor] = [ErrorInterceptor()]
    if tokens:
        interceptors.append(TokenInterceptor(tokens))
    server = grpc.aio.server(interceptors=interceptors, options=_SERVER_OPTIONS)
    register(server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection(
        [*services, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    return server


def _bind(
    server: grpc.aio.Server,
    field: str,
    host: str,
    port: int,
    credentials: grpc.ServerCredentials | None = None,
) -> int:
    """The port as the system chose it."""
    address = f"{host}:{port}"
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(
            f"{field}: {address} cannot be bound; another process listens there, or the host is "
            "not this machine's; choose another, or 0 for a free one"
        ) from error


def connect(address: str, security: SecuritySettings | None = None) -> grpc.aio.Channel:
    """A channel with keepalive that notices a dead peer within 40 seconds.

    With `security` it is private, shows this service's certificate and carries its token. The
    server's certificate must name the host in `address`; where it does not, or where one side
    speaks TLS and the other not, calls end with gRPC's own UNAVAILABLE.

    Raises:
        ConfigError: a file of `security` cannot be used.
    """
    security = security or PLAINTEXT
    credentials = security.channel_credentials()
    channel = (
        grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)
    )
    token = security.token()
    return TokenChannel(channel, token) if token else channel
