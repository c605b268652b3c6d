"""Metrics that are read from the replica's objects when Prometheus asks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from common.adapter import AdapterRef
from rollout_svc.generation.requests import RunningRequests
from rollout_svc.metrics import Metrics
from rollout_svc.versions.registry import AdapterRegistry

_READ_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class LiveMetrics(Collector):
    """Prometheus calls it in a thread of its own, and the event loop reads.

    Make it in the event loop that the objects belong to.
    """

    registry: AdapterRegistry
    requests: RunningRequests
    metrics: Metrics
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def collect(self) -> Iterable[Metric]:
        """Raises `TimeoutError` where the event loop is stuck."""
        return asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(_READ_SECONDS)

    async def _read(self) -> list[Metric]:
        slots = self.registry.lora_slots
        return [
            *_versions(self.registry.listing(), self.metrics.newest_sent),
            _gauge("slots", "LoRA slots of the engine.", slots.count),
            _gauge("slots_used", "LoRA slots with an adapter in them.", slots.used),
            _gauge("slots_pinned", "LoRA slots that running requests use.", slots.pinned),
            _gauge(
                "requests_waiting",
                "Generate calls that wait for a version, a slot or the weights.",
                self.requests.waiting,
            ),
            _gauge("requests_admitted", "Requests in the engine.", len(self.registry.uses)),
        ]


def _versions(served: list[AdapterRef], sent: dict[str, AdapterRef]) -> list[Metric]:
    """By adapter: how many versions, the newest, and how far it is behind the newest sent."""
    newest = _family("adapter_version", "Version served that was committed last.")
    count = _family("adapter_versions", "Versions served.")
    behind = _family("adapter_versions_behind", "Newest version sent minus the newest served.")
    for adapter in sorted({ref.adapter for ref in served}):
        refs = [ref for ref in served if ref.adapter == adapter]
        newest.add_metric([adapter], refs[-1].version)
        count.add_metric([adapter], len(refs))
        behind.add_metric([adapter], _behind(refs, sent.get(adapter)))
    return [newest, count, behind]


def _behind(served: list[AdapterRef], sent: AdapterRef | None) -> int:
    """All of it where nothing of the newest run is served."""
    if sent is None:
        return 0
    newest = max((ref.version for ref in served if ref.run_id == sent.run_id), default=0)
    return max(sent.version - newest, 0)


def _family(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"refit_rollout_{name}", text, labels=["adapter"])


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"refit_rollout_{name}", text, value=value)
