from __future__ import annotations

from typing import Literal

import pytest

from common.config import validate_config
from common.errors import ConfigError
from trainer_svc.metrics import StepGauges
from trainer_svc.rl.settings import RlSettings
from trainer_svc.rl.staleness import StalenessBound, describe_staleness


@pytest.mark.parametrize(
    ("stale", "max_staleness", "ahead", "first", "oldest"),
    [
        ("wait", 0, 0, 1, 9),
        ("wait", 1, 0, 1, 8),
        ("wait", 1, 1, 1, 9),
        ("wait", 3, 1, 1, 7),
        ("drop", 0, 0, 1, 9),
        ("drop", 1, 1, 1, 8),
        ("drop", 3, 1, 1, 6),
        ("wait", 3, 0, 8, 8),
        ("drop", 3, 0, 9, 9),
    ],
)
def test_oldest_version_that_may_answer_at_version_9(
    stale: Literal["drop", "wait"], max_staleness: int, ahead: int, first: int, oldest: int
) -> None:
    bound = StalenessBound(max_staleness, stale)
    assert bound.oldest_asked(9, ahead=ahead, first=first) == oldest


def test_fresh_is_within_the_bound() -> None:
    bound = StalenessBound(2, "drop")
    assert [bound.is_fresh(version, current=9) for version in (6, 7, 9)] == [False, True, True]


def test_every_sample_is_described() -> None:
    assert describe_staleness([1, 0, 0, 3]) == {
        "staleness": {"0": 2, "1": 1, "3": 1},
        "staleness_mean": 1.0,
        "staleness_max": 3,
    }


def test_the_histogram_counts_every_sample() -> None:
    gauges = StepGauges()
    gauges.show_staleness([0, 0, 1, 5])
    gauges.show_staleness([17])

    buckets = {
        bound: gauges.registry.get_sample_value(
            "refit_trainer_sample_staleness_bucket", {"le": bound}
        )
        for bound in ("0.0", "1.0", "2.0", "3.0", "4.0", "8.0", "16.0", "+Inf")
    }
    assert list(buckets.values()) == [2, 3, 3, 3, 3, 4, 4, 5]


def test_generation_further_ahead_than_samples_may_be_old_is_refused() -> None:
    values = {"data": "d", "reward": "r", "max_staleness": 1, "async_steps": 2}
    with pytest.raises(ConfigError) as caught:
        validate_config(RlSettings, values, source="t")
    assert str(caught.value) == (
        "t: async_steps: found 2; raise rl.max_staleness, which is 1, or take fewer steps"
    )
