"""The endpoint at which Prometheus reads a service's metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server

from common.errors import ConfigError


@contextmanager
def metrics_served(
    registry: CollectorRegistry, *, host: str, port: int | None
) -> Iterator[int | None]:
    """Answer Prometheus inside the block; gives the bound port, None where `port` asks for none.

    Raises:
        ConfigError: the address cannot be bound.
    """
    if port is None:
        yield None
        return
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigError(
            f"metrics_port: {host}:{port} cannot be bound ({error.strerror}); choose another"
        ) from error
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
