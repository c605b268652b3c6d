"""What the trainer counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from refit.v1 import adapter_pb2

from common.stream.frames import Chunk, Event
from trainer_svc.metrics import StepGauges, UpdateMetrics


def test_updates_are_counted_by_outcome_part_and_stage() -> None:
    registry = CollectorRegistry()
    metrics = UpdateMetrics(registry)
    timings = adapter_pb2.UpdateTimings(wire_seconds=0.5, stage_seconds=0.25, commit_seconds=0.125)
    committed, refused = adapter_pb2.OUTCOME_COMMITTED, adapter_pb2.OUTCOME_REFUSED
    for report in (
        adapter_pb2.ReportAdapterRequest(outcome=committed, timings=timings),
        adapter_pb2.ReportAdapterRequest(outcome=committed),
        adapter_pb2.ReportAdapterRequest(outcome=refused, stage="UPDATE_STAGE_CANARY"),
        adapter_pb2.ReportAdapterRequest(outcome=refused, stage=99),  # type: ignore[arg-type]
    ):
        metrics.reported(report)
    value = registry.get_sample_value
    assert value("refit_trainer_updates_total", {"outcome": "committed"}) == 2
    assert value("refit_trainer_updates_total", {"outcome": "refused"}) == 2
    assert value("refit_trainer_update_refusals_total", {"stage": "canary"}) == 1
    assert value("refit_trainer_update_refusals_total", {"stage": "unspecified"}) == 1
    for part, seconds in (("wire", 0.5), ("stage", 0.25), ("commit", 0.125)):
        assert value("refit_trainer_replica_update_seconds_sum", {"part": part}) == seconds
        assert value("refit_trainer_replica_update_seconds_count", {"part": part}) == 1


def test_bytes_are_those_of_chunks_and_of_what_is_around_them() -> None:
    registry = CollectorRegistry()
    metrics = UpdateMetrics(registry)
    heartbeat = Event(heartbeat=adapter_pb2.Heartbeat(interval_seconds=5))
    metrics.sent(Chunk(0, memoryview(bytes(1000)), 0))
    metrics.sent(heartbeat)
    assert (
        registry.get_sample_value("refit_trainer_sent_bytes_total") == 1000 + heartbeat.ByteSize()
    )


def test_samples_add_up_over_the_steps_by_what_became_of_them() -> None:
    gauges = StepGauges()
    gauges.show({"samples": 16, "samples_lost": 4, "samples_stale": 1, "reward_mean": 0.5})
    gauges.show({"samples": 8, "samples_lost": 0, "samples_stale": 2, "reward_mean": 0.75})
    value = gauges.registry.get_sample_value
    fates = ("trained", "lost", "stale")
    found = [value("refit_trainer_run_samples_total", {"fate": fate}) for fate in fates]
    assert found == [24, 4, 3]
    assert value("refit_trainer_samples_lost") == 0
    assert value("refit_trainer_reward_mean") == 0.75


def test_a_steps_row_and_the_updates_share_a_registry() -> None:
    """Every key of a row becomes a gauge, and no name may be taken twice."""
    gauges = StepGauges()
    UpdateMetrics(gauges.registry)
    gauges.show({"update_seconds": 0.25, "updates_seconds": 0.5, "staleness_max": 1})
    assert gauges.registry.get_sample_value("refit_trainer_update_seconds") == 0.25
