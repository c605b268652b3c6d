"""Importance weights between trainer and rollout, by token and by sequence."""

from __future__ import annotations

from typing import Any

import pytest

from tests.token_batches import make_tokens
from trainer_svc.megatron.training.importance import importance_weights
from trainer_svc.megatron.training.settings import TrainSettings
from trainer_svc.megatron.training.tokens import TokenBatch


def of_ratios(*ratios: float, lengths: list[int] | None = None) -> TokenBatch:
    """Tokens whose probability with the trainer is `ratio` times that with the rollout."""
    return make_tokens(
        ratios=[1.0] * len(ratios),
        trainer=[0.1 * ratio for ratio in ratios],
        rollout=[0.1] * len(ratios),
        lengths=lengths,
    )


def weights(tokens: TokenBatch, **settings: Any) -> tuple[list[float], list[bool]]:
    found = importance_weights(tokens, settings=TrainSettings.model_validate(settings))
    return found.weight.tolist(), [bool(cut) for cut in found.cut]


def test_a_tokens_weight_is_its_ratio_up_to_the_cap() -> None:
    found, cut = weights(of_ratios(0.8, 9.0, 1.0, 0.01))
    assert found == pytest.approx([0.8, 2.0, 1.0, 0.01])
    assert cut == [False, True, False, False]


def test_a_mask_drops_what_lies_outside_and_keeps_the_rest_as_it_is() -> None:
    found, cut = weights(of_ratios(0.8, 9.0, 1.9, 0.01), tis_mode="mask", tis_floor=0.5)
    assert found == pytest.approx([0.8, 0.0, 1.9, 0.0])
    assert cut == [False, True, False, True]


def test_a_sequences_weight_is_the_product_of_its_tokens() -> None:
    tokens = of_ratios(0.5, 3.0, 2.0, 2.0, 0.5, lengths=[2, 3])
    found, cut = weights(tokens, tis_level="sequence")
    assert found == pytest.approx([1.5, 1.5, 2.0, 2.0, 2.0])
    assert not any(cut)
    found, cut = weights(tokens, tis_level="sequence", tis_cap=1.75)
    assert found == pytest.approx([1.5, 1.5, 1.75, 1.75, 1.75])
    assert cut == [False, False, True, True, True]


def test_a_masked_sequence_goes_whole() -> None:
    tokens = of_ratios(0.5, 3.0, 2.0, 2.0, 0.5, lengths=[2, 3])
    found, cut = weights(tokens, tis_level="sequence", tis_mode="mask", tis_cap=1.75)
    assert found == pytest.approx([1.5, 1.5, 0.0, 0.0, 0.0])
    assert cut == [False, False, True, True, True]
    found, _ = weights(tokens, tis_level="sequence", tis_mode="mask", tis_floor=1.75, tis_cap=4)
    assert found == pytest.approx([0.0, 0.0, 2.0, 2.0, 2.0])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_cap_of_zero_leaves_every_weight_at_one(level: str) -> None:
    found, cut = weights(of_ratios(0.1, 30.0), tis_cap=0, tis_level=level)
    assert found == [1.0, 1.0]
    assert not any(cut)


def test_a_ratio_beyond_float32_is_cut_not_infinite() -> None:
    tokens = of_ratios(*[1e10] * 20, lengths=[20])
    assert weights(tokens, tis_level="sequence")[0] == [2.0] * 20
    assert weights(tokens, tis_level="sequence", tis_mode="mask")[0] == [0.0] * 20
