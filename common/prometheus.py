"""The endpoint at which Prometheus reads a service's metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.registry import Collector

from common.errors import ConfigError


@contextmanager
def metrics_served(
    *registries: CollectorRegistry, host: str, port: int | None
) -> Iterator[int | None]:
    """Answer Prometheus inside the block, with the metrics of all registries.

    Gives the bound port, None where `port` asks for none.

    Raises:
        ConfigError: the address cannot be bound.
    """
    if port is None:
        yield None
        return
    joined = CollectorRegistry(support_collectors_without_names=True)
    joined.register(_Joined(registries))
    try:
        server, thread = start_http_server(port, addr=host, registry=joined)
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


class _Joined(Collector):
    def __init__(self, registries: Iterable[CollectorRegistry]) -> None:
        self._registries = tuple(registries)

    def collect(self) -> Iterable[Metric]:
        return chain.from_iterable(registry.collect() for registry in self._registries)
