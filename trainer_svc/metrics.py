"""The trainer's Prometheus metrics: the last step's figures, as in metrics.jsonl, and staleness."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Gauge, Histogram


class StepGauges:
    """One gauge `refit_trainer_<key>` for every number of a step's row.

    Beside them `refit_trainer_sample_staleness`, a histogram of all samples trained on.
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

    def show(self, metrics: Mapping[str, float]) -> None:
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
