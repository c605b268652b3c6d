from __future__ import annotations

import math

import pytest

from trainer_svc.rl.advantage import group_advantages


def test_advantages_are_standard_scores() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0], eps=0.0) == [1.0, -1.0, -1.0, 1.0]
    found = group_advantages([1.0, 0.0, 0.0, 0.0], eps=0.0)
    assert found == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3])


def test_without_normalising_the_mean_alone_goes() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0], normalise=False) == [0.5, -0.5, -0.5, 0.5]


def test_equal_rewards_have_exactly_no_advantage() -> None:
    assert group_advantages([0.1] * 7) == [0.0] * 7
    assert group_advantages([0.3]) == [0.0]


@pytest.mark.parametrize("rewards", [[], [1.0, math.nan], [math.inf, 0.0]])
def test_rewards_that_are_no_numbers_are_refused(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="finite rewards"):
        group_advantages(rewards)
