"""Groups from a fleet whose replicas answer, fail or die."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest
from refit.v1 import rollout_pb2

from common.adapter import AdapterRef
from common.errors import (
    AdapterNotFound,
    AlreadyExists,
    Incompatible,
    InvalidField,
    PermissionDenied,
    QueueFull,
    RefitError,
    Unauthenticated,
    WaitExpired,
)
from tests.eventually import eventually
from tests.fake_fleet import FakeFleet, fake_fleet
from tests.group_replica import OLD, REF, STOP, Replica
from trainer_svc.fleet import Fleet
from trainer_svc.rl.completion import Completion
from trainer_svc.rl.sampler import Answer, Sampler


class Unimplemented(RefitError):
    code = grpc.StatusCode.UNIMPLEMENTED


WHOLE = [
    Completion([0, 9], [-1.0, -0.5], "ab", [(3, 2)], STOP),
    Completion([1, 9], [-2.0, -0.5], "ab", [(3, 2)], STOP),
]


def _sampler(fleet: FakeFleet, *, hedge_after_seconds: float | None = None) -> Sampler:
    return Sampler(
        cast(Fleet, fleet),
        run_id="run",
        adapter="default",
        params=rollout_pb2.SamplingParams(max_tokens=2),
        group_size=2,
        published={2: OLD, 3: REF},
        hedge_after_seconds=hedge_after_seconds,
    )


async def _group(sampler: Sampler, *, timeout_seconds: float = 5) -> Answer:
    return await sampler.group(
        [5, 6], request_id="run-1-0-v3", version=3, timeout_seconds=timeout_seconds
    )


async def test_a_group_is_put_together_by_index() -> None:
    replica = Replica()
    async with fake_fleet(replica, held=REF) as fleet:
        answer = await _group(_sampler(fleet))

    assert answer == Answer(WHOLE, hedged=False)
    assert fleet.heard == [("answered", "r0")]
    request = replica.requests[0]
    assert (list(request.token_ids.ids), request.n) == ([5, 6], 2)
    assert request.adapter.rule == rollout_pb2.VERSION_RULE_AT_LEAST
    selector = request.adapter
    assert (selector.run_id, selector.adapter, selector.version) == ("run", "default", 3)


@pytest.mark.parametrize(
    ("broken", "heard"),
    [
        ({"error": AdapterNotFound("gone")}, "failed: NOT_FOUND gone"),
        ({"error": RefitError("?")}, "failed: INTERNAL ?"),
        ({"error": Unauthenticated("token")}, "failed: UNAUTHENTICATED token"),
        ({"error": PermissionDenied("role")}, "failed: PERMISSION_DENIED role"),
        ({"error": Incompatible("model")}, "failed: FAILED_PRECONDITION model"),
        ({"error": Unimplemented("what")}, "failed: UNIMPLEMENTED what"),
        ({"error": InvalidField("n: 2")}, "failed: INVALID_ARGUMENT n: 2"),
        ({"ends": (STOP,)}, "failed: the answer ended before all of its completions did"),
        ({"ends": (STOP, STOP, STOP)}, "failed: answered with completion 2 of 2"),
        ({"hangs": True}, "failed: DEADLINE_EXCEEDED"),
        ({"error": QueueFull("full")}, None),
        ({"error": AlreadyExists("running")}, None),
    ],
)
async def test_a_group_that_breaks_is_sampled_elsewhere_and_counted_once(
    broken: dict[str, Any], heard: str | None
) -> None:
    """faults.md 24, SkyRL#2035: every try has one id, and nothing of the broken answer is kept.

    A full queue and an earlier try that still runs are nobody's fault.
    """
    bad, whole = Replica(**broken), Replica()
    async with fake_fleet(bad, whole, held=REF) as fleet:
        answer = await _group(_sampler(fleet), timeout_seconds=2)
        assert [replica.outstanding for replica in fleet.replicas] == [0, 0]

    assert answer == Answer(WHOLE, hedged=False)
    *of_bad, last = fleet.heard
    assert last == ("answered", "r1")
    assert [(said.startswith(heard or "?"), name) for said, name in of_bad] == (
        [(True, "r0")] if heard else []
    )
    assert [r.request_id for r in bad.requests + whole.requests] == ["run-1-0-v3"] * 2


async def test_the_only_replica_is_asked_again_after_a_pause() -> None:
    """faults.md 24, SkyRL#2035: under the id it knows."""
    replica = Replica(error=QueueFull("full"), failures=1)
    async with fake_fleet(replica, held=REF) as fleet:
        started = asyncio.get_running_loop().time()
        answer = await _group(_sampler(fleet))
        assert asyncio.get_running_loop().time() - started >= 1.0

    assert answer.completions == WHOLE
    assert [r.request_id for r in replica.requests] == ["run-1-0-v3"] * 2


async def test_when_every_replica_failed_the_wait_has_an_end() -> None:
    """faults.md 23, prime-rl#2230."""
    async with fake_fleet(Replica(error=AdapterNotFound("gone")), held=REF) as fleet:
        with pytest.raises(WaitExpired, match=r"tried \['r0'\]; r0: NOT_FOUND gone$"):
            await _group(_sampler(fleet), timeout_seconds=0.5)


async def test_a_request_that_two_replicas_refuse_is_not_tried_again_and_they_are_not_blamed() -> (
    None
):
    faults = [Replica(error=InvalidField("top_p: 2")) for _ in range(2)]
    other = Replica()
    async with fake_fleet(*faults, other, held=REF) as fleet:
        with pytest.raises(InvalidField, match=r"replica r1 .*: INVALID_ARGUMENT top_p: 2$"):
            await _group(_sampler(fleet))

    assert [len(r.requests) for r in (*faults, other)] == [1, 1, 0]
    assert fleet.heard == []


async def test_a_request_that_the_only_replica_refuses_is_not_tried_again() -> None:
    fault, away = Replica(error=InvalidField("top_p: 2")), Replica()
    async with fake_fleet(fault, away, held=REF) as fleet:
        fleet.replicas[1].takes_prompts = False
        with pytest.raises(InvalidField, match=r"replica r0 .*: INVALID_ARGUMENT top_p: 2$"):
            await _group(_sampler(fleet))

    assert (len(fault.requests), away.requests, fleet.heard) == (1, [], [])


async def test_one_misconfigured_replica_costs_no_group_while_the_others_work() -> None:
    bad = Replica(error=Unauthenticated("token"))
    async with fake_fleet(bad, Replica(), Replica(), held=REF) as fleet:
        sampler = _sampler(fleet)
        answers = await asyncio.gather(*(_group(sampler) for _ in range(40)))

    assert answers == [Answer(WHOLE, hedged=False)] * 40


@pytest.mark.parametrize(
    ("made_by", "reason"),
    [
        (None, "answered with the base model"),
        (
            replace(REF, digest=b"x" * 32),
            r"answered with default@3 \(run run, 7878.*published",
        ),
        (replace(REF, run_id="old"), r"answered with default@3 \(run old"),
        (replace(REF, adapter="other"), r"answered with other@3 \(run run"),
        (replace(REF, version=4), "published was no such version"),
        (OLD, "asked for was at least 3"),
    ],
)
async def test_a_replica_with_other_weights_is_quarantined_and_its_tokens_are_void(
    made_by: AdapterRef | None, reason: str
) -> None:
    """faults.md 2, verl#3821: a sample is attributable to the bytes that made it."""
    async with fake_fleet(Replica(ref=made_by), Replica(), held=REF) as fleet:
        answer = await _group(_sampler(fleet))

    assert answer.completions == WHOLE
    (said, replica), *rest = fleet.heard
    assert (replica, rest) == ("r0", [("answered", "r1")])
    assert re.match(f"quarantine: .*{reason}", said)


async def test_a_replica_that_leaves_in_the_middle_costs_no_more_than_its_answer() -> None:
    leaving = Replica(hangs=True)
    async with fake_fleet(leaving, Replica(), held=REF) as fleet:
        group = asyncio.ensure_future(_group(_sampler(fleet)))
        await eventually(lambda: leaving.requests)
        await fleet.replicas[0].channel.close()
        answer = await group

    assert answer.completions == WHOLE
    assert fleet.heard == [
        ("failed: it left while it was answering", "r0"),
        ("answered", "r1"),
    ]


async def test_a_late_group_is_hedged_and_the_loser_is_cancelled() -> None:
    """faults.md 24, SkyRL#2035: two replicas work, one answer counts."""
    slow, quick = Replica(hangs=True), Replica()
    async with fake_fleet(slow, quick, held=REF) as fleet:
        answer = await _group(_sampler(fleet, hedge_after_seconds=0.1))
        await eventually(lambda: slow.cancelled)
        assert [replica.outstanding for replica in fleet.replicas] == [0, 0]

    assert answer == Answer(WHOLE, hedged=True)
    assert fleet.heard == [("answered", "r1")]
    assert [r.request_id for r in slow.requests + quick.requests] == ["run-1-0-v3"] * 2


async def test_a_group_in_time_is_not_hedged() -> None:
    other = Replica()
    async with fake_fleet(Replica(), other, held=REF) as fleet:
        answer = await _group(_sampler(fleet, hedge_after_seconds=3))

    assert (answer, other.requests) == (Answer(WHOLE, hedged=False), [])


async def test_a_hedge_never_asks_the_same_replica_twice() -> None:
    slow = Replica(hangs=True)
    async with fake_fleet(slow, held=REF) as fleet:
        with pytest.raises(WaitExpired):
            await _group(_sampler(fleet, hedge_after_seconds=0.05), timeout_seconds=1.5)

    assert len(slow.requests) == 1
