"""Prometheus metrics of a replica."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from common.errors import ConfigError

_UPDATE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """One set of metrics in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.update_seconds = Histogram(
            "refit_rollout_update_seconds",
            "Time of committed updates by part: wire, stage, commit.",
            ["part"],
            buckets=_UPDATE_BUCKETS,
            registry=self.registry,
        )
        self.updates = Counter(
            "refit_rollout_updates",
            "Updates by outcome: committed, refused.",
            ["outcome"],
            registry=self.registry,
        )
        self.adapters_live = Gauge(
            "refit_rollout_adapters_live",
            "Versions a request may ask for.",
            registry=self.registry,
        )
        self.requests_running = Gauge(
            "refit_rollout_requests_running",
            "Generate calls that have not ended.",
            registry=self.registry,
        )
        self.tokens = Counter(
            "refit_rollout_tokens", "Tokens sampled and sent.", registry=self.registry
        )

    @contextmanager
    def served(self, *, host: str, port: int) -> Iterator[int]:
        """Answer Prometheus inside the block; gives the bound port.

        Raises:
            ConfigError: the address cannot be bound.
        """
        try:
            server, thread = start_http_server(port, addr=host, registry=self.registry)
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
