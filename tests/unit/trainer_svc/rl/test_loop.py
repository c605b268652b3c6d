"""The loop over replicas that lag, answer late or come back: which samples train which step."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from refit.v1 import rollout_pb2

from common.errors import WorkerLost
from common.grpc_server import Context
from common.rules import Merge, Rules, Swap
from common.wire import ref_to_proto
from tests.eventually import eventually
from tests.rl_bench import Bench, Ranks, Servicer
from trainer_svc.megatron.protocol import Sample


async def test_in_turns_every_sample_is_of_the_version_that_trains(tmp_path: Path) -> None:
    """faults.md 24, SkyRL#2035: one request a (run, step, prompt)."""
    run = await Bench(tmp_path).run(steps=3)

    assert run.trained == [[1] * 4, [2] * 4, [3] * 4]
    assert run.column("staleness") == [{"0": 4}] * 3
    assert run.column("version") == [2, 3, 4]
    assert run.column("samples_stale") == run.column("hedged") == [0, 0, 0]
    assert run.ids == [["1-0-v1", "1-1-v1", "2-0-v2", "2-1-v2", "3-0-v3", "3-1-v3"]]
    assert run.publisher.canaries == [None] * 4
    buckets = run.node.control.gauges.registry
    assert buckets.get_sample_value("refit_trainer_sample_staleness_bucket", {"le": "0.0"}) == 12


async def test_a_step_is_generated_while_the_one_before_trains(tmp_path: Path) -> None:
    """Training waits here for the next step's prompts; taking turns, that would be for ever."""

    bench = Bench(tmp_path)
    run = await bench.run(steps=3, async_steps=1, max_staleness=1)

    assert run.column("staleness") == [{"0": 4}, {"1": 4}, {"1": 4}]
    assert run.column("staleness_max") == [0, 1, 1]
    assert run.trained == [[1] * 4, [1] * 4, [2] * 4]
    assert run.ids == [["1-0-v1", "1-1-v1", "2-0-v1", "2-1-v1", "3-0-v2", "3-1-v2"]]
    assert bench.fleet.max_staleness == 1


def _r1_stays_at_1(replica: str, version: int) -> bool:
    return replica == "r0" or version == 1


async def test_wait_keeps_prompts_from_a_replica_that_is_too_far_behind(tmp_path: Path) -> None:
    bench = Bench(tmp_path, replicas=2, commits=_r1_stays_at_1)
    run = await bench.run(steps=3, max_staleness=1)

    assert run.column("staleness") == [{"0": 4}, {"0": 2, "1": 2}, {"0": 4}]
    assert run.column("samples_stale") == [0, 0, 0]
    assert len(run.requests[1]) == 2


async def test_drop_throws_away_what_became_too_old(tmp_path: Path) -> None:
    """Step 3 is asked for at version 2, of r1 at 1 as well; it trains at 3."""
    bench = Bench(tmp_path, replicas=2, commits=_r1_stays_at_1)
    run = await bench.run(steps=4, stale="drop", max_staleness=1, async_steps=1)

    assert run.column("staleness") == [{"0": 4}, {"1": 4}, {"1": 2}, {"1": 4}]
    assert run.column("samples_stale") == [0, 0, 2, 0]
    assert run.column("samples") == [4, 4, 2, 4]
    assert run.trained[2] == [2, 2]


async def test_wait_would_not_have_asked_for_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, replicas=2, commits=_r1_stays_at_1)
    run = await bench.run(steps=4, stale="wait", max_staleness=1, async_steps=1)

    assert run.column("staleness") == [{"0": 4}, {"1": 4}, {"1": 4}, {"1": 4}]
    assert run.column("samples_stale") == [0, 0, 0, 0]


async def test_a_step_whose_samples_are_all_too_old_is_sampled_again(tmp_path: Path) -> None:
    """The same prompts, under other ids: r1 alone takes prompts until version 3 is out."""

    def commits(replica: str, version: int) -> bool:
        r0 = bench.fleet.replicas[0]
        r0.takes_prompts = version >= 3
        return replica == "r0" or version == 1

    bench = Bench(tmp_path, replicas=2, commits=commits)
    run = await bench.run(steps=3, stale="drop", max_staleness=1, async_steps=1)

    assert run.column("staleness") == [{"0": 4}, {"1": 4}, {"0": 4}]
    assert run.column("samples_stale") == [0, 0, 4]
    assert run.trained[2] == [3] * 4
    assert run.ids[1][-2:] == ["3-0-v1", "3-1-v1"]
    assert run.ids[0] == ["3-0-v3", "3-1-v3"]


async def test_what_was_sampled_before_a_restart_trains_nothing(tmp_path: Path) -> None:
    """Step 2 dies after step 3 was sampled at version 2; the checkpoint is published as 3."""
    lost: list[int] = []

    async def die_once(step: int) -> None:
        await bench.ahead(step, earlier=4 if lost else 0)
        if step == 2 and not lost:
            lost.append(step)
            raise WorkerLost("ranks ended")

    bench = Bench(tmp_path, ranks=Ranks(die_once))
    run = await bench.run(steps=3, async_steps=1, max_staleness=1, checkpoint_every_steps=1)

    assert run.column("step") == [1, 2, 3]
    assert run.column("version") == [2, 4, 5]
    assert run.trained == [[1] * 4, [3] * 4, [3] * 4]
    assert run.column("staleness") == [{"0": 4}, {"0": 4}, {"1": 4}]
    assert run.ids == [
        [
            *("1-0-v1", "1-1-v1", "2-0-v1", "2-0-v3", "2-1-v1", "2-1-v3"),
            *("3-0-v2", "3-0-v3", "3-1-v2", "3-1-v3"),
        ]
    ]


async def test_every_version_carries_the_canary(tmp_path: Path) -> None:
    run = await Bench(tmp_path).run(steps=2, canary_prompts=2)

    assert [canary.sequences[1].token_ids for canary in run.publisher.canaries if canary] == [
        (1, 1)
    ] * 3
    assert all(seconds >= 0 for seconds in run.column("canary_seconds"))


@pytest.mark.parametrize("key", ["wire_bytes", "canary_difference"])
async def test_the_row_shows_the_slowest_replica(tmp_path: Path, key: str) -> None:
    def commits(replica: str, version: int) -> bool:
        slow = bench.fleet.replicas[1]
        slow.timings.wire_seconds, slow.wire_bytes, slow.canary_difference = 3.0, 77, 0.125
        return True

    bench = Bench(tmp_path, replicas=2, commits=commits)
    run = await bench.run(steps=1)
    assert run.rows[0][key] == {"wire_bytes": 77, "canary_difference": 0.125}[key]


async def test_lessons_come_before_the_first_version_and_once(tmp_path: Path) -> None:
    """The ranks die in the warm start, which begins anew, and in step 2, which needs none."""

    async def die(step: int) -> None:
        if (len(ranks.settings), step) in ((1, 2), (3, 6)):
            ranks.trained.append([])
            raise WorkerLost("ranks ended")

    ranks = Ranks(die)
    lessons = [Sample((number,), (9,), (0.0,), 1.0) for number in range(40)]
    run = await Bench(tmp_path, ranks=ranks, lessons=lessons).run(steps=2, checkpoint_every_steps=1)

    assert [len(samples) for samples in run.trained] == [32, 0, 32, 8, 4, 0, 4]
    losses = [settings.train.loss for settings in ranks.settings]
    assert losses == ["cross_entropy", "cross_entropy", "grpo", "grpo"]
    adapter = tmp_path / "warm_start" / "adapter"
    assert [settings.adapter_path for settings in ranks.settings] == [None, None, adapter, None]
    assert run.column("version") == [2, 4]


async def test_side_policies_go_out_under_the_number_of_the_policy(tmp_path: Path) -> None:
    """`old` follows after every second step; its publication makes no sample staler."""
    run = await (bench := Bench(tmp_path)).run(
        sides=("old", "reference"), steps=5, old_policy={"interval": 2, "decay": 0.75}
    )

    assert run.publisher.sides == [("old", 1), ("reference", 1), ("old", 3), ("old", 5)]
    assert bench.ranks.adapters == ["old"]
    assert bench.ranks.averages == [("old", 0.75, 2), ("old", 0.75, 4)]
    assert run.column("staleness") == [{"0": 4}] * 5
    assert run.column("version") == [2, 3, 4, 5, 6]


async def test_old_checkpoints_go_when_a_new_one_is_saved(tmp_path: Path) -> None:
    await Bench(tmp_path).run(steps=5, checkpoint_every_steps=1, keep_checkpoints=2)

    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-000004", "step-000005"]


class Aborting(Servicer):
    """Has one token of what is generated ahead when the next version comes, and cuts it off."""

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        ahead = request.request_id.split("-")[1] != "1"
        if not ahead or request.prefix_token_ids:
            async for part in super().Generate(request, context):
                yield part
            return
        self.requests.append(request.request_id.split("-", 1)[1])
        (ref,) = self.replica.committed.values()
        for index in range(request.n):
            yield rollout_pb2.GenerateResponse(
                index=index, token_ids=[7], logprobs=[-ref.version], adapter=ref_to_proto(ref)
            )
        await eventually(lambda: ref not in self.replica.committed.values())
        for index in range(request.n):
            yield rollout_pb2.GenerateResponse(
                index=index,
                adapter=ref_to_proto(ref),
                finish_reason=rollout_pb2.FINISH_REASON_ABORT,
            )


async def test_a_fleet_that_serves_the_newest_version_alone_trains_every_step(
    tmp_path: Path,
) -> None:
    """`merge = rollout` with `swap = abort`: what was begun on the version before ends on the next.

    Steps 2 and 3 are half generated when the weights change; the oldest token counts.
    """

    def commits(replica: str, version: int) -> bool:
        bench.fleet.replicas[0].committed.clear()
        return True

    async def begun(step: int) -> None:
        groups = {f"{step + 1}-{index}" for index in (0, 1)} if step < 3 else set()
        (servicer,) = bench.servicers
        await eventually(lambda: groups <= {name.split("-v")[0] for name in servicer.requests})

    bench = Bench(
        tmp_path,
        ranks=Ranks(begun),
        commits=commits,
        make_servicer=Aborting,
        top={"merge": "rollout", "swap": "abort"},
    )
    run = await bench.run(steps=3, async_steps=1, max_staleness=1)

    assert run.column("samples") == [4, 4, 4]
    assert run.column("samples_resumed") == run.column("samples_mixed") == [0, 4, 4]
    assert run.column("staleness") == [{"0": 4}, {"1": 4}, {"1": 4}]
    assert run.column("completion_tokens_mean") == [1, 2, 2]
    assert run.trained == [[1] * 4, [1] * 4, [2] * 4]


async def test_rules_go_with_every_version_and_to_who_joins(tmp_path: Path) -> None:
    bench = Bench(tmp_path, top={"merge": "never", "swap": "continue"})
    run = await bench.run(sides=("old",), steps=1, old_policy={})

    rules = Rules(Swap.CONTINUE, Merge.NEVER)
    assert run.publisher.sides == [("old", 1), ("old", 2)]
    assert run.publisher.rules == [rules] * 4
    assert bench.fleet.required == (rules, frozenset({"default", "old"}))
