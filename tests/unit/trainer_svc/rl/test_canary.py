from __future__ import annotations

from typing import cast

import pytest

from common.adapter import Canary, CanarySequence
from common.errors import ConfigError
from trainer_svc.megatron.client import MegatronWorker
from trainer_svc.megatron.protocol import Batch, Sample
from trainer_svc.rl.canary import CanaryMaker


class Worker:
    """Scores token t as -t."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    async def logprobs(self, batch: Batch, *, deadline_seconds: float) -> list[list[float]]:
        self.batches.append(batch)
        return [[-float(t) for t in sample.completion_ids] for sample in batch.samples]


def _maker(worker: Worker, *prompts: list[int]) -> CanaryMaker:
    ranks = cast(MegatronWorker, worker)
    return CanaryMaker(ranks, prompts, max_difference=0.25, deadline_seconds=5)


async def test_each_token_but_the_first_is_scored_at_temperature_1() -> None:
    worker = Worker()
    canary = await _maker(worker, [7, 8, 9], [1], [5, 6]).make()

    assert canary == Canary(
        (CanarySequence((7, 8, 9), (-8.0, -9.0)), CanarySequence((5, 6), (-6.0,))), 0.25
    )
    assert worker.batches == [
        Batch((Sample((7,), (8, 9), (0.0, 0.0), 0.0), Sample((5,), (6,), (0.0,), 0.0)), 1.0)
    ]


async def test_of_a_long_prompt_the_end_is_scored() -> None:
    canary = await _maker(Worker(), list(range(100))).make()
    assert canary.sequences[0].token_ids == tuple(range(68, 100))
    assert len(canary.sequences[0].logprobs) == 31


def test_prompts_of_one_token_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rl\.canary_prompts: the first 2 prompts have one"):
        _maker(Worker(), [1], [2])
