"""The loop over replicas that lag, answer late or come back: which samples train which step."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import WorkerLost
from tests.rl_bench import Bench, Ranks
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
