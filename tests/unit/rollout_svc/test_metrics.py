"""What the replica's endpoint says."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from contextlib import AsyncExitStack

import pytest
from prometheus_client import CollectorRegistry, Gauge
from refit.v1 import adapter_pb2

from common.adapter import AdapterRef
from common.errors import CanaryRefused, StagingFull
from common.prometheus import metrics_served
from rollout_svc.engine import TokenDelta
from rollout_svc.generation.requests import RunningRequests
from rollout_svc.live_metrics import LiveMetrics
from rollout_svc.metrics import AnswerTimes, Metrics
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.versions.selector import Rule, Selector
from tests.fake_engine import FakeEngine
from tests.live import Commits, admit


def read(port: int | None) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return list(answer.read().decode().splitlines())


def test_the_endpoint_serves_what_was_counted_and_another_registry() -> None:
    metrics, other = Metrics(), CollectorRegistry()
    metrics.tokens.inc(3)
    metrics.updates.labels("committed").inc()
    Gauge("vllm:some", "Of the engine", registry=other).set(5)
    with metrics_served(metrics.registry, other, host="127.0.0.1", port=0) as port:
        lines = read(port)
    assert "refit_rollout_tokens_total 3.0" in lines
    assert 'refit_rollout_updates_total{outcome="committed"} 1.0' in lines
    assert "refit_rollout_adapters_live 0.0" in lines
    assert "vllm:some 5.0" in lines


def test_refusals_are_counted_by_stage_and_kind_of_error() -> None:
    metrics = Metrics()
    metrics.refused(CanaryRefused("one text"), adapter_pb2.UPDATE_STAGE_CANARY)
    metrics.refused(CanaryRefused("another"), adapter_pb2.UPDATE_STAGE_CANARY)
    metrics.refused(StagingFull("no room"), adapter_pb2.UPDATE_STAGE_STAGE)
    value = metrics.registry.get_sample_value
    name = "refit_rollout_update_refusals_total"
    assert value(name, {"stage": "canary", "reason": "CanaryRefused"}) == 2
    assert value(name, {"stage": "stage", "reason": "StagingFull"}) == 1
    assert value("refit_rollout_updates_total", {"outcome": "refused"}) == 3


def test_the_times_of_tokens_are_those_of_each_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token counts once a request; two tokens that come together share their time."""
    clock = iter((0.0, 2.0, 2.5, 3.0, 4.5))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    metrics = Metrics()
    times = AnswerTimes(metrics)
    for index, count in ((0, 1), (1, 1), (0, 2), (1, 0), (1, 1)):
        times.add(TokenDelta(index, (7,) * count, (-1.0,) * count, "", None))
    value = metrics.registry.get_sample_value
    assert value("refit_rollout_first_token_seconds_sum") == 2.0
    assert value("refit_rollout_first_token_seconds_count") == 1
    assert value("refit_rollout_inter_token_seconds_sum") == (3.0 - 2.0) / 2 + (4.5 - 2.5)
    assert value("refit_rollout_inter_token_seconds_count") == 2
    assert value("refit_rollout_tokens_total") == 5


async def test_versions_slots_and_the_queue_are_read_when_asked_for(
    registry: AdapterRegistry, engine: FakeEngine, commit: Commits
) -> None:
    metrics = Metrics()
    requests = RunningRequests(abort=engine.abort, max_requests=4)
    metrics.registry.register(LiveMetrics(registry, requests, metrics))
    for version in (1, 2):
        await commit(AdapterRef("run", "default", version, bytes([version] * 32)))
    metrics.was_sent(AdapterRef("run", "default", 5, bytes(32)))
    metrics.was_sent(AdapterRef("run", "default", 4, bytes(32)))
    async with AsyncExitStack() as held:
        latest = Selector(Rule.LATEST, "default")
        await held.enter_async_context(admit(registry, latest, wait_seconds=1))
        await held.enter_async_context(requests.admission())
        with metrics_served(metrics.registry, host="127.0.0.1", port=0) as port:
            lines = await asyncio.to_thread(read, port)
    assert {
        'refit_rollout_adapter_version{adapter="default"} 2.0',
        'refit_rollout_adapter_versions{adapter="default"} 2.0',
        'refit_rollout_adapter_versions_behind{adapter="default"} 3.0',
        "refit_rollout_slots 3.0",
        "refit_rollout_slots_used 2.0",
        "refit_rollout_slots_pinned 1.0",
        "refit_rollout_requests_waiting 1.0",
        "refit_rollout_requests_admitted 1.0",
    } <= set(lines)


async def test_a_new_run_is_behind_by_its_own_versions(
    registry: AdapterRegistry, engine: FakeEngine, commit: Commits
) -> None:
    """Its numbers begin anew: they say nothing beside those of the run before."""
    metrics = Metrics()
    requests = RunningRequests(abort=engine.abort, max_requests=4)
    metrics.registry.register(LiveMetrics(registry, requests, metrics))
    old = AdapterRef("run", "default", 40, bytes(32))
    metrics.was_sent(old)
    await commit(old)
    metrics.was_sent(AdapterRef("next", "default", 2, bytes(32)))
    name, labels = "refit_rollout_adapter_versions_behind", {"adapter": "default"}
    assert await asyncio.to_thread(metrics.registry.get_sample_value, name, labels) == 2
