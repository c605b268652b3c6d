"""The trainer's Prometheus metrics: of steps, as in metrics.jsonl, and of updates as they come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from refit.v1 import adapter_pb2

from common.stream.frames import Chunk, Message

_UPDATE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_FATES = {"trained": "samples", "lost": "samples_lost", "stale": "samples_stale"}
"""By what a step's row calls their number."""


class StepGauges:
    """One gauge `refit_trainer_<key>` for every number of a step's row.

    Beside them `refit_trainer_sample_staleness`, a histogram of all samples trained on, and
    `refit_trainer_run_samples_total`, all samples of the run by what became of them.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._staleness = Histogram(
            "refit_trainer_sample_staleness",
            "Versions between the one that made a sample and the one that was trained on it",
            buckets=(0, 1, 2, 3, 4, 8, 16),
            registry=self.registry,
        )
        self._samples = Counter(
            "refit_trainer_run_samples",
            "Samples of this process by fate: trained on, lost with their replicas, or too stale",
            ["fate"],
            registry=self.registry,
        )

    def show(self, metrics: Mapping[str, float]) -> None:
        """Show a step's row."""
        for fate, key in _FATES.items():
            self._samples.labels(fate).inc(metrics.get(key, 0))
        for key, value in metrics.items():
            if key not in self._gauges:
                self._gauges[key] = Gauge(
                    f"refit_trainer_{key}", f"{key} of the last step", registry=self.registry
                )
            self._gauges[key].set(value)

    def show_staleness(self, samples: Iterable[int]) -> None:
        """Count the staleness, in versions, of samples that were trained on."""
        for staleness in samples:
            self._staleness.observe(staleness)


class UpdateMetrics:
    """What was sent to replicas, and what they said became of it; in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._sent_bytes = Counter(
            "refit_trainer_sent_bytes",
            "Sent to subscribers by this trainer; what relays pass on is not among it",
            registry=registry,
        )
        self._updates = Counter(
            "refit_trainer_updates",
            "Reports of replicas by outcome: committed, refused",
            ["outcome"],
            registry=registry,
        )
        self._refusals = Counter(
            "refit_trainer_update_refusals",
            "Updates that replicas refused, by the stage in which they did",
            ["stage"],
            registry=registry,
        )
        self._seconds = Histogram(
            "refit_trainer_replica_update_seconds",
            "Time of updates that replicas committed by part: wire, stage, commit",
            ["part"],
            buckets=_UPDATE_BUCKETS,
            registry=registry,
        )

    def sent(self, message: Message) -> None:
        size = len(message.data) if isinstance(message, Chunk) else message.ByteSize()
        self._sent_bytes.inc(size)

    def reported(self, report: adapter_pb2.ReportAdapterRequest) -> None:
        """Take a report that was accepted."""
        if report.outcome == adapter_pb2.OUTCOME_REFUSED:
            self._updates.labels("refused").inc()
            self._refusals.labels(_stage(report.stage)).inc()
            return
        self._updates.labels("committed").inc()
        # An alias takes no time.
        if report.HasField("timings"):
            timings = report.timings
            self._seconds.labels("wire").observe(timings.wire_seconds)
            self._seconds.labels("stage").observe(timings.stage_seconds)
            self._seconds.labels("commit").observe(timings.commit_seconds)


def _stage(number: int) -> str:
    """A later version of the contract may know more of them."""
    names = {value: name for name, value in adapter_pb2.UpdateStage.items()}
    return names.get(number, "UPDATE_STAGE_UNSPECIFIED").removeprefix("UPDATE_STAGE_").lower()
