"""Groups whose completions are cut off: their tokens stay, the rest is sampled elsewhere."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import cast

import grpc
import pytest
from refit.v1 import rollout_pb2

from common.adapter import AdapterRef
from common.errors import InvalidField, Unavailable, WaitExpired
from common.grpc_server import Context
from common.wire import ref_to_proto
from tests.adapters import make_ref
from tests.counting_replica import CountingReplica, counted
from tests.eventually import eventually
from tests.fake_fleet import FakeFleet, fake_fleet
from tests.group_replica import MANIFEST, OLD, REF, STOP, Replica, Response
from trainer_svc.fleet import Fleet
from trainer_svc.rl.completion import Completion
from trainer_svc.rl.sampler import Answer, Sampler

NEXT = make_ref(MANIFEST, version=4)
PARAMS = rollout_pb2.SamplingParams(max_tokens=6, temperature=0.5, stop=["x"])


def _sampler(
    fleet: FakeFleet,
    *,
    params: rollout_pb2.SamplingParams = PARAMS,
    group_size: int = 2,
    hedge_after_seconds: float | None = None,
) -> Sampler:
    return Sampler(
        cast(Fleet, fleet),
        run_id="run",
        adapter="default",
        params=params,
        group_size=group_size,
        published={2: OLD, 3: REF, 4: NEXT},
        hedge_after_seconds=hedge_after_seconds,
    )


async def _group(sampler: Sampler, *, timeout_seconds: float = 5) -> Answer:
    return await sampler.group(
        [5, 6], request_id="run-1-0-v2", version=2, timeout_seconds=timeout_seconds
    )


async def test_what_was_cut_off_goes_on_from_its_tokens() -> None:
    """faults.md 24, SkyRL#2035: no token is sampled twice; each has its own version's logprob."""
    replica = CountingReplica(2)
    async with fake_fleet(replica, held=REF) as fleet:
        answer = await _group(_sampler(fleet))

    assert answer == Answer([counted((2, 2), (3, 4), resumed=1)] * 2, hedged=False)
    assert answer.completions[0].version == 2
    group, *rests = replica.requests
    assert (group.n, list(group.prefix_token_ids)) == (2, [])
    assert [(r.n, list(r.prefix_token_ids)) for r in rests] == [(1, [0, 1])] * 2
    for rest in rests:
        assert rest.sampling == group.sampling
        assert rest.adapter == group.adapter
        assert rest.token_ids == group.token_ids
    assert fleet.heard == [("answered", "r0")] * 3


async def test_a_rest_has_an_id_of_its_own_and_always_the_same() -> None:
    """faults.md 24, SkyRL#2035: by the group's id, the completion's index and its tokens."""
    asked = []
    for _ in range(2):
        replica = CountingReplica(1, 3, refs=(OLD, REF, NEXT))
        async with fake_fleet(replica, held=NEXT) as fleet:
            answer = await _group(_sampler(fleet))
        assert answer.completions == [counted((2, 1), (3, 2), (4, 3), resumed=2)] * 2
        asked.append(sorted(request.request_id for request in replica.requests))

    assert asked[0] == asked[1]
    group, *rests = asked[0]
    assert group == "run-1-0-v2"
    assert len(set(rests)) == 4
    assert Counter(name.rsplit("-", 1)[0] for name in rests) == {f"{group}-0": 2, f"{group}-1": 2}


async def test_completions_that_ended_by_themselves_are_kept() -> None:
    replica = CountingReplica(2, whole=[1])
    async with fake_fleet(replica, held=REF) as fleet:
        answer = await _group(_sampler(fleet))

    assert answer.completions == [counted((2, 2), (3, 4), resumed=1), counted((2, 2), reason=STOP)]
    assert len(replica.requests) == 2


async def test_another_replica_finishes_what_a_drained_one_began() -> None:
    def drain() -> None:
        fleet.replicas[0].takes_prompts = False

    drained, other = CountingReplica(4, on_cut=drain), CountingReplica(refs=[REF])
    async with fake_fleet(drained, other, held=REF) as fleet:
        answer = await _group(_sampler(fleet))

    assert answer.completions == [counted((2, 4), (3, 2), resumed=1)] * 2
    assert [request.n for request in drained.requests] == [2]
    assert [list(request.prefix_token_ids) for request in other.requests] == [[0, 1, 2, 3]] * 2


async def test_a_rest_that_breaks_is_asked_for_again_under_its_id() -> None:
    """faults.md 24, SkyRL#2035: of the broken answer nothing is kept, of the one before all is."""
    replica = CountingReplica(2, errors={2: Unavailable("dies")})
    async with fake_fleet(replica, held=REF) as fleet:
        answer = await _group(_sampler(fleet, group_size=1))

    assert answer.completions == [counted((2, 2), (3, 4), resumed=1)]
    _, broken, again = replica.requests
    assert broken == again
    assert fleet.heard == [
        ("answered", "r0"),
        ("failed: UNAVAILABLE dies", "r0"),
        ("answered", "r0"),
    ]


async def test_what_was_cut_off_before_its_first_token_is_asked_for_as_it_was() -> None:
    stopped, other = CountingReplica(0), CountingReplica(refs=[REF])
    async with fake_fleet(stopped, other, held=REF) as fleet:
        answer = await _group(_sampler(fleet))

    assert answer.completions == [counted((3, 6))] * 2
    assert stopped.requests == other.requests
    assert fleet.heard == [("answered", "r1")]


async def test_a_rest_that_nobody_samples_has_an_end() -> None:
    """faults.md 23, prime-rl#2230."""
    errors = {number: Unavailable("away") for number in range(2, 9)}
    async with fake_fleet(CountingReplica(2, errors=errors), held=REF) as fleet:
        with pytest.raises(WaitExpired, match=r"tried \['r0'\]; r0: UNAVAILABLE away$"):
            await _group(_sampler(fleet), timeout_seconds=0.5)


async def test_a_rest_that_is_refused_ends_the_group() -> None:
    replica = CountingReplica(2, errors={2: InvalidField("prefix: no"), 3: InvalidField("prefix")})
    async with fake_fleet(replica, held=REF) as fleet:
        with pytest.raises(InvalidField, match="INVALID_ARGUMENT prefix"):
            await _group(_sampler(fleet))


async def test_a_late_rest_is_hedged_and_the_group_before_it_is_not() -> None:
    """faults.md 24, SkyRL#2035: a group that has an answer is not asked for again."""

    def hang() -> None:
        slow.hangs = True

    class Hanging(CountingReplica):
        hangs = False

        async def Generate(
            self, request: rollout_pb2.GenerateRequest, context: Context
        ) -> AsyncIterator[Response]:
            if self.hangs:
                await asyncio.Event().wait()
            async for part in super().Generate(request, context):
                yield part

    slow, quick = Hanging(2, on_cut=hang), CountingReplica(refs=[REF])
    async with fake_fleet(slow, quick, held=REF) as fleet:
        fleet.replicas[1].outstanding = 1
        group = asyncio.ensure_future(
            _group(_sampler(fleet, group_size=1, hedge_after_seconds=0.2))
        )
        await eventually(lambda: slow.hangs)
        answer = await group

    assert answer == Answer([counted((2, 2), (3, 4), resumed=1)], hedged=True)
    assert [list(request.prefix_token_ids) for request in quick.requests] == [[0, 1]]


async def test_a_rest_is_not_drawn_with_the_seed_of_what_came_before() -> None:
    seeded = rollout_pb2.SamplingParams(max_tokens=6, seed=7)
    replica = CountingReplica(1, 3, refs=(OLD, REF, NEXT))
    async with fake_fleet(replica, held=NEXT) as fleet:
        await _group(_sampler(fleet, params=seeded))

    seeds = [request.sampling.seed for request in replica.requests]
    assert seeds[0] == 7
    assert len(set(seeds)) == 5
    assert all(0 <= seed < 1 << 32 for seed in seeds)


class Swapping(Replica):
    """The versions of a completion's messages, one token each; the last one ends it."""

    def __init__(self, *refs: AdapterRef) -> None:
        super().__init__()
        self._made_by = refs

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[Response]:
        self.requests.append(request)
        for index in range(request.n):
            for number, ref in enumerate(self._made_by, 1):
                yield Response(
                    index=index,
                    token_ids=[number],
                    logprobs=[-number],
                    adapter=ref_to_proto(ref),
                    finish_reason=STOP if number == len(self._made_by) else None,
                )


async def test_a_sample_is_as_old_as_its_oldest_token_and_says_who_made_which() -> None:
    async with fake_fleet(Swapping(OLD, OLD, REF, NEXT), held=REF) as fleet:
        answer = await _group(_sampler(fleet, group_size=1))

    whole = Completion([1, 2, 3, 4], [-1, -2, -3, -4], "", [(2, 2), (3, 1), (4, 1)], STOP)
    assert answer.completions == [whole]
    assert whole.version == 2


@pytest.mark.parametrize(
    "wrong",
    [replace(NEXT, digest=b"x" * 32), make_ref(MANIFEST, version=5), replace(OLD, version=1)],
)
async def test_every_message_is_checked_for_who_made_it(wrong: AdapterRef) -> None:
    """faults.md 2, verl#3821: one token of other weights makes the answer void."""
    async with fake_fleet(Swapping(OLD, wrong, REF), Swapping(REF), held=REF) as fleet:
        answer = await _group(_sampler(fleet, group_size=1))

    assert answer.completions == [Completion([1], [-1], "", [(3, 1)], STOP)]
    assert fleet.heard[0][0].startswith("quarantine: answered with default@")


class Full(CountingReplica):
    """Says `times` times that it is full, and when to come again."""

    def __init__(self, pushback: str, *, times: int = 1) -> None:
        super().__init__(refs=[REF])
        self.pushback, self.times = pushback, times
        self.asked_at: list[float] = []

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[Response]:
        self.asked_at.append(asyncio.get_running_loop().time())
        if len(self.asked_at) <= self.times:
            metadata = (("grpc-retry-pushback-ms", self.pushback),)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", metadata)
        async for part in super().Generate(request, context):
            yield part


@pytest.mark.parametrize(
    ("pushback", "seconds"), [("300", 0.3), ("0", 0.0), ("1400", 1.4), ("-1", 1.0), ("?", 1.0)]
)
async def test_a_full_replica_is_asked_again_when_it_said(pushback: str, seconds: float) -> None:
    replica = Full(pushback)
    async with fake_fleet(replica, held=REF) as fleet:
        answer = await _group(_sampler(fleet))

    assert answer.completions == [counted((3, 6))] * 2
    first, second = replica.asked_at
    assert seconds <= second - first < seconds + 0.25
    assert fleet.heard == [("answered", "r0")]


async def test_meanwhile_the_others_are_asked() -> None:
    full, other = Full("3000"), CountingReplica(refs=[REF])
    async with fake_fleet(full, other, held=REF) as fleet:
        answer = await _group(_sampler(fleet))

    assert answer.completions == [counted((3, 6))] * 2
    assert (len(full.asked_at), len(other.requests)) == (1, 1)
