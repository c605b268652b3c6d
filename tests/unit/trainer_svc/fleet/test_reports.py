"""What a replica's word changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from refit.v1 import adapter_pb2, tensor_pb2
from safetensors.numpy import save_file

from common.adapter import BASE_NAME, AdapterRef
from common.errors import CorruptUpdate, InvalidField, ReplicaNotFound
from tests.large_adapters import make_large
from tests.subscriptions import Run, committed, refused, subscription_request
from tests.whole_weights import make_weights
from trainer_svc.base_weights import BaseWeights
from trainer_svc.fleet.status import fleet_status


async def test_no_prompt_before_the_report(run: Run) -> None:
    """faults.md 6, miles#1724: a replica gets traffic once it holds the version.

    faults.md 5, ART#661: and from then on, at once.
    """
    ref = run.publish(1)
    with run.fleet.members.joined(subscription_request()):
        assert not await run.fleet.wait_for_any(
            "default", 1, avoid=frozenset(), timeout_seconds=0.01
        )
        run.fleet.report(committed("r1", ref))
        with run.fleet.leased("default", 1, avoid=frozenset()) as replica:
            assert replica.id == "r1"


async def test_a_report_of_other_bytes_is_corrupt(run: Run) -> None:
    """faults.md 1, verl#7495: what a replica serves is what was published."""
    ref = run.publish(1)
    other = replace(ref, digest=b"x" * 32)
    with run.fleet.members.joined(subscription_request()) as replica:
        with pytest.raises(CorruptUpdate, match=r"committed default@1 .*, published was default@1"):
            run.fleet.report(committed("r1", other))
        assert not replica.serves("default", 1)
        assert not replica.takes_prompts("default")


CHANGES: dict[str, Callable[[AdapterRef], AdapterRef]] = {
    "newer": lambda ref: replace(ref, version=99),
    "other run": lambda ref: replace(ref, run_id="other"),
    "unknown adapter": lambda ref: replace(ref, adapter="unknown"),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_a_report_of_what_was_never_published_is_refused(run: Run, name: str) -> None:
    ref = CHANGES[name](run.publish(1))
    with run.fleet.members.joined(subscription_request()) as replica:
        with pytest.raises(InvalidField, match="never published"):
            run.fleet.report(committed("r1", ref))
        assert replica.committed == {}
        assert replica.takes_prompts("default")


async def test_a_late_report_of_a_version_that_is_retired_is_taken(run: Run) -> None:
    gone, *_, newest = [run.publish(version) for version in (1, 2, 3)]
    with run.fleet.members.joined(subscription_request()) as replica:
        run.fleet.report(committed("r1", newest, gone))
        assert list(replica.committed.values()) == [newest]


async def test_a_report_without_a_subscription_is_not_found(run: Run) -> None:
    with pytest.raises(ReplicaNotFound, match="'r1'"):
        run.fleet.report(committed("r1", run.publish(1)))


async def test_a_report_without_an_outcome_is_refused(run: Run) -> None:
    request = committed("r1", run.publish(1))
    request.ClearField("outcome")
    with (
        run.fleet.members.joined(subscription_request()),
        pytest.raises(InvalidField, match="outcome: 0"),
    ):
        run.fleet.report(request)


@pytest.mark.parametrize(
    ("stage", "quarantined"),
    [(adapter_pb2.UPDATE_STAGE_WIRE, False), (adapter_pb2.UPDATE_STAGE_CANARY, True)],
)
async def test_a_refusal_is_kept_with_its_stage_until_the_next_commit(
    run: Run, stage: adapter_pb2.UpdateStage, quarantined: bool
) -> None:
    """faults.md 26, dynamo#8630: what it served before the refusal it serves after it.

    What the wire damaged comes again, so it is no reason not to ask the replica.
    """
    first, second = run.publish(1), run.publish(2)
    with run.fleet.members.joined(subscription_request(held=[first])) as replica:
        run.fleet.report(refused("r1", second, first, stage=stage))
        assert replica.refusal is not None
        assert (replica.refusal.ref, replica.refusal.stage) == (second, stage)
        assert replica.refusal.reason == "no room"
        assert list(replica.committed.values()) == [first]
        assert (replica.takes_prompts("default"), replica.refused("default", 2)) == (
            not quarantined,
            quarantined,
        )
        run.fleet.report(committed("r1", first, second))
        assert replica.refusal is None
        assert replica.takes_prompts("default")


async def test_what_the_update_took_is_kept(run: Run) -> None:
    request = committed("r1", run.publish(1))
    request.timings.wire_seconds = 0.5
    request.wire_bytes = 200
    request.canary_difference = 0.0
    with run.fleet.members.joined(subscription_request()) as replica:
        run.fleet.report(request)
        assert (replica.timings.wire_seconds, replica.wire_bytes) == (0.5, 200)
        assert replica.canary_difference == 0.0


async def test_the_link_is_measured_by_updates_that_were_sent_as_they_are(run: Run) -> None:
    """A delta says nothing of it, nor does an update of less than a mebibyte."""
    small = run.publish(1)
    large = run.publisher.publish("large", *make_large(tensors=2, width=1 << 17), version=1)
    with run.fleet.members.joined(subscription_request()) as replica:
        for ref, wire_bytes in ((small, 200), (large, 3 << 20), (large, 4 << 20)):
            assert replica.subscription.link_bytes_per_second == float("inf")
            request = committed("r1", ref)
            request.wire_bytes, request.timings.wire_seconds = wire_bytes, 0.5
            run.fleet.report(request)
        assert replica.subscription.link_bytes_per_second == 8 << 20


async def test_a_refusal_stands_until_the_same_adapter_is_committed(run: Run) -> None:
    """faults.md 2, verl#3821: an alias of another adapter says nothing of what was refused."""
    first, second = run.publish(1), run.publish(2)
    alias = run.publish(1, adapter="old")
    with run.fleet.members.joined(subscription_request(held=[first])) as replica:
        run.fleet.report(refused("r1", second, first))
        for held in ([first, alias], [alias, first]):
            run.fleet.report(committed("r1", *held))
            assert (replica.takes_prompts("default"), replica.takes_prompts("old")) == (False, True)
            assert replica.refused("default", 2)
            assert replica.refusal is not None
            assert replica.refusal.ref == second
        run.fleet.report(committed("r1", alias, second))
        assert replica.takes_prompts("default")
        assert replica.refusal is None


async def test_every_adapter_has_its_own_refusal(run: Run) -> None:
    default, task = run.publish(1), run.publish(2, adapter="task")
    with run.fleet.members.joined(subscription_request()) as replica:
        run.fleet.report(refused("r1", task))
        run.fleet.report(refused("r1", default))
        assert (replica.refused("task", 2), replica.refused("default", 1)) == (True, True)
        run.fleet.report(committed("r1", default))
        assert (replica.takes_prompts("task"), replica.takes_prompts("default")) == (False, True)
        assert replica.refusal is not None
        assert replica.refusal.ref == task


async def test_other_bytes_under_the_name_of_right_ones_are_no_longer_served(run: Run) -> None:
    ref = run.publish(1)
    with run.fleet.members.joined(subscription_request(held=[ref])) as replica:
        with pytest.raises(CorruptUpdate):
            run.fleet.report(committed("r1", replace(ref, digest=b"x" * 32)))
        assert replica.committed == {}
        assert not replica.takes_prompts("default")


async def test_a_long_reason_is_cut(run: Run) -> None:
    ref = run.publish(1)
    report = refused("r1", ref)
    report.reason = "a" * 1024 + "b"
    with run.fleet.members.joined(subscription_request()) as replica:
        run.fleet.report(report)
        assert replica.refusal is not None
        assert replica.refusal.reason == "a" * 1024


def _mismatch(number: int, detail: str = "") -> adapter_pb2.TensorMismatch:
    reason = adapter_pb2.MISMATCH_REASON_NO_MODULE
    return adapter_pb2.TensorMismatch(tensor=f"layers.{number}.x", reason=reason, detail=detail)


@pytest.mark.parametrize(
    ("reason", "count", "expected"),
    [
        ("no room", 0, "no room"),
        ("no room", 1, "no room; no place for layers.0.x (is (8, 2), not (4, 2))"),
        ("layers.0.x is odd", 1, "layers.0.x is odd"),
        (
            "layers.0.x is odd",
            5,
            "layers.0.x is odd; no place for layers.1.x (MISMATCH_REASON_NO_MODULE), layers.2.x "
            "(MISMATCH_REASON_NO_MODULE), layers.3.x (MISMATCH_REASON_NO_MODULE) and 1 more",
        ),
    ],
)
async def test_a_refusal_names_the_tensors_without_a_place(
    run: Run, reason: str, count: int, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    """faults.md 8, vllm#55193: where the fleet is looked at, and not on the replica alone."""
    ref = run.publish(1)
    report = refused("r1", ref)
    report.reason = reason
    report.mismatches.extend(
        _mismatch(number, "" if number else "is (8, 2), not (4, 2)") for number in range(count)
    )
    with run.fleet.members.joined(subscription_request()) as replica:
        run.fleet.report(report)
        assert replica.refusal is not None
        assert replica.refusal.reason == expected
        (status,) = fleet_status(run.fleet)
        assert status.refusal == expected
    assert any(record.getMessage().endswith(f": {expected}") for record in caplog.records)


async def test_a_mismatch_of_a_reason_that_is_not_known_yet_is_named(run: Run) -> None:
    ref = run.publish(1)
    report = refused("r1", ref)
    report.mismatches.append(_mismatch(0))
    report.mismatches[0].reason = 99  # type: ignore[assignment]
    with run.fleet.members.joined(subscription_request()) as replica:
        run.fleet.report(report)
        assert replica.refusal is not None
        assert replica.refusal.reason.endswith("layers.0.x (for a reason unknown here)")


async def test_a_base_that_was_committed_is_no_version(run: Run, tmp_path: Path) -> None:
    """Its refusal is shown until it is committed; other bytes than were sent are corrupt."""
    save_file({"model.norm.weight": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    run.publisher.base = BaseWeights(tmp_path, base_fingerprint="base")
    run.publish(1)
    request = subscription_request()
    request.capabilities.needs_base = True
    request.capabilities.kinds.extend(
        [adapter_pb2.ADAPTER_KIND_LORA, adapter_pb2.ADAPTER_KIND_BASE]
    )
    with run.fleet.members.joined(request) as replica:
        assert replica.subscription.needs_base
        early = AdapterRef("run", BASE_NAME, 1, b"x" * 32)
        with pytest.raises(InvalidField, match="was never sent"):
            run.fleet.report(committed("r1", early))
        ref = (await run.publisher.base.content("run")).ref
        run.fleet.report(refused("r1", ref))
        assert run.fleet.state(replica).reason.startswith("refused @base@1")
        with pytest.raises(CorruptUpdate, match="committed @base@1"):
            run.fleet.report(committed("r1", early))
        report = committed("r1", ref)
        report.ClearField("held")
        run.fleet.report(report)
        assert run.fleet.state(replica).reason == "receives default@1"
        assert replica.committed == {}


async def test_a_merged_run_sends_no_base_first(run: Run) -> None:
    """A merged version brings every weight itself."""
    content = make_weights()
    run.fleet.require(content.manifest)
    request = subscription_request()
    request.capabilities.needs_base = True
    request.capabilities.kinds.append(adapter_pb2.ADAPTER_KIND_MERGED)
    request.capabilities.dtypes.append(tensor_pb2.DTYPE_BFLOAT16)
    with run.fleet.members.joined(request) as replica:
        assert not replica.subscription.needs_base
