"""Prometheus metrics of a replica; no label is a version or a request, so that they stay few."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram
from refit.v1 import adapter_pb2

from common.adapter import AdapterRef
from common.errors import RefitError
from rollout_svc.engine import TokenDelta

_UPDATE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
STATES = ("starting", "asleep", "empty", "serving")


class Metrics:
    """One set of metrics in a registry of its own. `LiveMetrics` has those that are read."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.newest_sent: dict[str, AdapterRef] = {}
        """Of each adapter, whatever became of it."""

        self._make_of_updates()
        self._make_of_requests()
        self.state = Enum(
            "refit_rollout_state",
            "starting: the engine does not answer yet, or not any more; empty: no version yet.",
            states=list(STATES),
            registry=self.registry,
        )
        self.engine_restarts = Counter(
            "refit_rollout_engine_restarts",
            "Engines that were started in the place of a dead one.",
            registry=self.registry,
        )

    def _make_of_updates(self) -> None:
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
        self.refusals = Counter(
            "refit_rollout_update_refusals",
            "Refused updates by the stage in which they were, and the kind of error.",
            ["stage", "reason"],
            registry=self.registry,
        )
        self.wire_bytes = Counter(
            "refit_rollout_wire_bytes",
            "Received for updates, whatever became of them.",
            registry=self.registry,
        )
        self.adapters_live = Gauge(
            "refit_rollout_adapters_live",
            "Versions a request may ask for.",
            registry=self.registry,
        )

    def _make_of_requests(self) -> None:
        self.requests_running = Gauge(
            "refit_rollout_requests_running",
            "Generate calls that have not ended.",
            registry=self.registry,
        )
        self.tokens = Counter(
            "refit_rollout_tokens", "Tokens sampled and sent.", registry=self.registry
        )
        self.first_token_seconds = Histogram(
            "refit_rollout_first_token_seconds",
            "From the arrival of a request to its first token.",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.inter_token_seconds = Histogram(
            "refit_rollout_inter_token_seconds",
            "From one token of a completion to the next; tokens sent together share the time.",
            buckets=_TOKEN_BUCKETS,
            registry=self.registry,
        )

    def was_sent(self, ref: AdapterRef) -> None:
        """A trainer began to send this version."""
        before = self.newest_sent.get(ref.adapter, ref)
        if before.run_id != ref.run_id or before.version <= ref.version:
            self.newest_sent[ref.adapter] = ref

    def refused(self, error: RefitError, stage: adapter_pb2.UpdateStage) -> None:
        """Count an update that was refused."""
        name = adapter_pb2.UpdateStage.Name(stage).removeprefix("UPDATE_STAGE_").lower()
        self.updates.labels("refused").inc()
        self.refusals.labels(name, type(error).__name__).inc()


class AnswerTimes:
    """Counts the tokens of one request, and the time between them; made when the request comes."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._begun = time.perf_counter()
        self._last: dict[int, float] = {}

    def add(self, delta: TokenDelta) -> None:
        """Take the next tokens of a completion, as they leave."""
        count = len(delta.token_ids)
        if not count:
            return
        now = time.perf_counter()
        before = self._last.get(delta.index)
        self._last[delta.index] = now
        self._metrics.tokens.inc(count)
        if before is not None:
            self._metrics.inter_token_seconds.observe((now - before) / count)
        elif len(self._last) == 1:
            self._metrics.first_token_seconds.observe(now - self._begun)
