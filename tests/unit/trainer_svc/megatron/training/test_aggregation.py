"""Weights of tokens in a minibatch's loss."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from trainer_svc.megatron.training.aggregation import token_weights


def test_weights_of_two_uneven_samples() -> None:
    assert token_weights([3, 1], aggregation="token_mean") == [1 / 4, 1 / 4]
    assert token_weights([3, 1], aggregation="sample_mean") == [1 / 6, 1 / 2]
    assert token_weights([3, 1], aggregation="constant", max_tokens=10) == [1 / 20, 1 / 20]


def test_a_constant_weight_depends_on_no_length() -> None:
    short = token_weights([1, 1], aggregation="constant", max_tokens=8)
    assert short == token_weights([8, 3], aggregation="constant", max_tokens=8)


def test_a_constant_without_the_longest_completion_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.max_tokens: constant aggregation divides by it"):
        token_weights([3, 1], aggregation="constant")
