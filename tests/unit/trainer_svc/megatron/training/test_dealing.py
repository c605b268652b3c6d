from __future__ import annotations

from trainer_svc.megatron.protocol import Sample
from trainer_svc.megatron.training.dealing import deal


def sample(prompt: int) -> Sample:
    return Sample((prompt,), (7, 8), (-1.0, -1.0), advantage=1.0)


def test_every_sample_is_dealt_once_and_prompts_stay_together() -> None:
    samples = [sample(prompt) for prompt in (5, 6, 5, 6, 5, 6, 5, 6)]
    assert deal(samples, parts=2) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_prompt_is_split_where_parts_meet() -> None:
    samples = [sample(prompt) for prompt in (5, 5, 5, 5, 6, 6)]
    assert deal(samples, parts=2) == [[0, 1, 2], [3, 4, 5]]


def test_more_parts_than_samples_leave_some_empty() -> None:
    assert deal([sample(5)], parts=3) == [[], [], [0]]
