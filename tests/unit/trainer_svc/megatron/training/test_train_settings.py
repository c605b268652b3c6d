"""What is accepted of `train` and `sft`."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trainer_svc.megatron.training.settings import SftSettings, TrainSettings


def test_an_unknown_loss_names_the_known_ones() -> None:
    known = "grpo, ppo, gspo, cispo, reinforce, cross_entropy"
    with pytest.raises(ValidationError, match=f"no such loss; choose one of {known}, or write"):
        TrainSettings(loss="gsppo")
    assert TrainSettings(loss="mine:loss").loss == "mine:loss"


def test_gspo_is_a_mean_over_samples_unless_told_otherwise() -> None:
    assert TrainSettings().weighting == "token_mean"
    assert TrainSettings(loss="gspo").weighting == "sample_mean"
    assert TrainSettings(loss="gspo", aggregation="token_mean").weighting == "token_mean"
    assert TrainSettings(aggregation="constant").weighting == "constant"


def test_the_upper_bound_follows_the_lower_unless_set() -> None:
    assert TrainSettings(clip_ratio=0.25).clip_bounds == (0.75, 1.25)
    assert TrainSettings(clip_ratio=0.25, clip_ratio_high=0.5).clip_bounds == (0.75, 1.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clip_ratio": 0}, "clip_ratio"),
        ({"clip_ratio": 1.1}, "clip_ratio"),
        ({"clip_ratio_c": 1.0}, "clip_ratio_c"),
        ({"aggregation": "sequence_mean"}, "sample_mean"),
        ({"kl_estimator": "k4"}, "'k1', 'k2', 'k3' or 'k3\\+'"),
        ({"tis_floor": 0.5}, "tis_floor: 0.5 bounds nothing unless tis_mode is mask"),
        ({"tis_floor": 1, "tis_mode": "mask", "tis_cap": 0}, "bounds nothing while tis_cap is 0"),
        ({"loss": "gspo", "clip_ratio_c": 3}, "clip_ratio_c: gspo has no dual clip"),
        ({"tis_floor": 2, "tis_mode": "mask"}, "tis_floor: 2.0 is not below tis_cap, 2.0"),
    ],
)
def test_what_cannot_be_meant_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainSettings.model_validate(values)


def test_a_warm_start_is_plain_cross_entropy_with_the_loops_optimizer() -> None:
    loop = TrainSettings(
        loss="gspo",
        aggregation="constant",
        lr=1e-3,
        kl_coef=0.1,
        minibatches=4,
        weight_decay=0.5,
        tis_mode="mask",
        tis_floor=0.5,
    )
    warm = SftSettings(data="x.jsonl").apply(loop)
    assert (warm.loss, warm.weighting, warm.lr) == ("cross_entropy", "token_mean", 1e-3)
    assert (warm.kl_coef, warm.tis_cap, warm.minibatches) == (0.0, 0.0, 1)
    assert warm.weight_decay == 0.5
    assert TrainSettings.model_validate(warm.model_dump()) == warm
    assert SftSettings(data="x.jsonl", lr=2e-5).apply(loop).lr == 2e-5
