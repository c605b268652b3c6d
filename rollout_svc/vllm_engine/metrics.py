"""vLLM's own Prometheus metrics."""

from __future__ import annotations

from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats


class VllmMetrics(PrometheusStatLogger):
    """Keeps them from growing: `vllm:lora_requests_info` has the names of the running adapters for
    labels, and every version is a new name."""

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None and self.gauge_lora_info is not None:
            self.gauge_lora_info.clear()
        super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
