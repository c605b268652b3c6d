from __future__ import annotations

import urllib.request

from common.prometheus import metrics_served
from rollout_svc.metrics import Metrics


def test_the_endpoint_serves_what_was_counted() -> None:
    metrics = Metrics()
    metrics.tokens.inc(3)
    metrics.updates.labels("committed").inc()
    with (
        metrics_served(metrics.registry, host="127.0.0.1", port=0) as port,
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer,
    ):
        lines = answer.read().decode().splitlines()
    assert "refit_rollout_tokens_total 3.0" in lines
    assert 'refit_rollout_updates_total{outcome="committed"} 1.0' in lines
    assert "refit_rollout_adapters_live 0.0" in lines
