"""The trainer's Prometheus metrics: the figures of the last step, as in metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge


class StepGauges:
    """One gauge `refit_trainer_<key>` for every number of a step's row."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}

    def show(self, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            if key not in self._gauges:
                self._gauges[key] = Gauge(
                    f"refit_trainer_{key}", f"{key} of the last step", registry=self.registry
                )
            self._gauges[key].set(value)
