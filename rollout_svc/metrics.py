"""Prometheus metrics of a replica."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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
