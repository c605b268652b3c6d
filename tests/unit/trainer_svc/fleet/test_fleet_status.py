"""The fleet as it is shown."""

from __future__ import annotations

import contextlib

from prometheus_client import CollectorRegistry
from refit.v1 import adapter_pb2, trainer_pb2

from common.wire import ref_to_proto
from tests.subscriptions import Run, committed, refused, subscription_request
from trainer_svc.fleet.status import FleetCollector, fleet_status
from trainer_svc.subscription import Parent


def _state(run: Run) -> tuple[str, str]:
    [status] = fleet_status(run.fleet)
    name = trainer_pb2.ReplicaState.Name(status.state)
    return name.removeprefix("REPLICA_STATE_"), status.reason


async def test_every_state_of_a_replicas_life_has_its_reason(run: Run) -> None:
    first = run.publish(1)
    with run.fleet.members.joined(subscription_request()):
        assert _state(run) == ("JOINING", "receives default@1")
        run.fleet.report(committed("r1", first))
        assert _state(run) == ("READY", "serves what the run asks for")
        second = run.publish(2)
        assert _state(run) == ("CATCHING_UP", "serves default@1 of 2")
        run.fleet.max_staleness = 1
        assert _state(run) == ("READY", "serves what the run asks for")
        run.fleet.report(refused("r1", second, first))
        assert _state(run) == ("QUARANTINED", f"refused {second}: no room")
        third = run.publish(3)
        run.fleet.report(committed("r1", third))
        assert _state(run) == ("READY", "serves what the run asks for")
    assert _state(run) == ("LOST", "its subscription ended")
    with run.fleet.members.joined(subscription_request(held=[third])):
        run.fleet.members.renew(
            adapter_pb2.RenewLeaseRequest(replica_id="r1", draining=True, reason="SIGTERM")
        )
        assert _state(run) == ("DRAINING", "SIGTERM")
    assert list(fleet_status(run.fleet)) == []


async def test_an_adapter_that_it_does_not_want_leaves_a_replica_ready(run: Run) -> None:
    held = run.publish(1)
    run.publish(5, adapter="other")
    request = subscription_request(held=[held])
    request.adapters.append("default")
    with run.fleet.members.joined(request):
        assert _state(run) == ("READY", "serves what the run asks for")
    with run.fleet.members.joined(subscription_request(held=[held])):
        assert _state(run) == ("CATCHING_UP", "serves other@0 of 5")


async def test_a_replica_is_shown_with_what_it_said(run: Run) -> None:
    """faults.md 1, verl#7495: every version with the digest that the replica gave for it."""
    first, second = run.publish(1), run.publish(2)
    with run.fleet.members.joined(subscription_request(held=[first])) as replica:
        report = committed("r1", first)
        report.wire_bytes, report.canary_difference = 123, 0.25
        run.fleet.report(report)
        run.fleet.report(refused("r1", second, first, stage=adapter_pb2.UPDATE_STAGE_CANARY))
        replica.subscription.parent = Parent("r0", "r0:1")
        replica.line.outstanding = 3

        assert list(fleet_status(run.fleet)) == [
            trainer_pb2.ReplicaStatus(
                replica_id="r1",
                address="r1:1",
                adapters=[ref_to_proto(first)],
                outstanding=3,
                refusal="no room",
                refusal_stage=adapter_pb2.UPDATE_STAGE_CANARY,
                state=trainer_pb2.REPLICA_STATE_QUARANTINED,
                reason=f"refused {second}: no room",
                parent="r0",
                canary_difference=0.25,
                wire_bytes=123,
            )
        ]


async def test_metrics_count_every_state_and_the_prompts(run: Run) -> None:
    ref = run.publish(1)
    registry = CollectorRegistry()
    registry.register(FleetCollector(run.fleet, run.publisher))
    with contextlib.ExitStack() as stack:
        for name in ("r1", "r2"):
            held = subscription_request(name, held=[ref])
            stack.enter_context(run.fleet.members.joined(held)).line.outstanding = 2
        stack.enter_context(run.fleet.members.joined(subscription_request("r3")))
        with run.fleet.members.joined(subscription_request("r4")):
            pass
        found = {
            state: registry.get_sample_value("refit_trainer_replicas", {"state": state})
            for state in ("joining", "catching_up", "ready", "draining", "lost", "quarantined")
        }
        prompts = registry.get_sample_value("refit_trainer_prompts_outstanding")

    assert found == {
        "joining": 1,
        "catching_up": 0,
        "ready": 2,
        "draining": 0,
        "lost": 1,
        "quarantined": 0,
    }
    assert prompts == 4


async def test_metrics_show_the_newest_version_and_the_slowest_replica(run: Run) -> None:
    """faults.md 5, ART#661: a fleet that stays behind is seen. Labels are names, never versions."""
    registry = CollectorRegistry()
    registry.register(FleetCollector(run.fleet, run.publisher))
    first = run.publish(1)
    second = run.publish(2)
    run.publish(7, adapter="other")

    def found(name: str, adapter: str) -> float | None:
        return registry.get_sample_value(f"refit_trainer_{name}", {"adapter": adapter})

    with (
        run.fleet.members.joined(subscription_request("r1", held=[first])),
        run.fleet.members.joined(subscription_request("r2", held=[second])),
    ):
        assert [found("adapter_version", name) for name in ("default", "other")] == [2, 7]
        assert [found("replica_versions_behind", name) for name in ("default", "other")] == [1, 7]
    assert found("replica_versions_behind", "default") == 0
