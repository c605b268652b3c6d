"""The whole loss of a step: loss function, importance weight, KL, and how a batch may be split."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from tests.token_batches import gradient, make_tokens
from trainer_svc.megatron.training.objective import Objective, metric_sums
from trainer_svc.megatron.training.settings import LOSSES, TrainSettings
from trainer_svc.megatron.training.tokens import TokenBatch

LENGTHS = [3, 1, 4, 2]


def objective(**settings: Any) -> Objective:
    return Objective(TrainSettings.model_validate(settings))


def batch(weights: list[float]) -> TokenBatch:
    """Four uneven samples, off-policy in every way; `weights` of their tokens."""
    torch.manual_seed(1)
    count, lengths = sum(LENGTHS), torch.tensor(LENGTHS)
    logprobs = -torch.rand(count) * 3
    near = [logprobs + torch.randn(count) * 0.4 for _ in range(4)]
    return TokenBatch(
        logprobs=logprobs.requires_grad_(),
        old_logprobs=near[0].detach(),
        trainer_logprobs=near[1].detach(),
        rollout_logprobs=near[2].detach(),
        advantages=torch.randn(4).repeat_interleave(lengths),
        weights=torch.tensor(weights).repeat_interleave(lengths),
        sample=torch.arange(4).repeat_interleave(lengths),
        num_samples=4,
        reference_logprobs=near[3].detach(),
        entropy=torch.rand(count),
    )


def part(tokens: TokenBatch, samples: list[int]) -> TokenBatch:
    """Those samples alone, as another micro-batch or another rank has them."""
    index = torch.cat([(tokens.sample == sample).nonzero()[:, 0] for sample in samples])
    chosen = {
        key: getattr(tokens, key)[index]
        for key in TokenBatch.__slots__
        if isinstance(getattr(tokens, key), torch.Tensor) and key != "sample"
    }
    lengths = torch.tensor([LENGTHS[sample] for sample in samples])
    own = torch.arange(len(samples)).repeat_interleave(lengths)
    return replace(tokens, **chosen, sample=own, num_samples=len(samples))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("aggregation", ["token_mean", "sample_mean", "constant"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("split", [[[1], [3, 0], [2]], [[0, 2], [1, 3]]])
def test_however_a_batch_is_split_loss_gradient_and_metrics_are_one(
    loss: str, aggregation: str, level: str, split: list[list[int]]
) -> None:
    """Into micro-batches, or over data-parallel ranks: each takes its samples' weights along."""
    whole = objective(
        loss=loss, aggregation=aggregation, tis_level=level, max_tokens=6, kl_coef=0.1
    )
    tokens = batch(whole.weights(LENGTHS))
    terms = whole(tokens)
    expected = (tokens.weights * terms.per_token).sum()
    (slope,) = torch.autograd.grad(expected, tokens.logprobs)

    total, sums = torch.zeros(()), dict.fromkeys(terms.metrics, 0.0)
    for samples in split:
        micro = part(tokens, samples)
        found = whole(micro)
        total = total + (micro.weights * found.per_token).sum()
        sums = {name: sums[name] + value for name, value in metric_sums(found).items()}
    (found_slope,) = torch.autograd.grad(total, tokens.logprobs)

    assert total.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    assert torch.allclose(found_slope, slope, rtol=1e-5, atol=1e-7)
    assert sums == pytest.approx(metric_sums(terms), rel=1e-5)


def test_the_loss_is_weighted_and_the_kl_is_not() -> None:
    tokens = make_tokens(
        ratios=[1.0, 1.0],
        advantages=[2.0, -1.0],
        trainer=[0.25, 0.25],
        rollout=[0.5, 0.05],
        reference=[0.125, 0.5],
    )
    terms = objective(kl_coef=0.1, kl_estimator="k2")(tokens)
    kl = math.log(2) ** 2 / 2
    assert terms.per_token.tolist() == pytest.approx([0.5 * -2 + 0.1 * kl, 2.0 * 1 + 0.1 * kl])
    expected = [0.5 * -2 + 0.1 * math.log(2), 2.0 * 1 - 0.1 * math.log(2)]
    assert gradient(tokens, terms) == pytest.approx(expected)


def test_metrics_are_per_token() -> None:
    tokens = make_tokens(ratios=[1.5, 1.0], trainer=[0.2, 0.9], rollout=[0.4, 0.1])
    tokens = replace(tokens, entropy=torch.tensor([0.5, 1.5]))
    terms = objective()(tokens)
    assert terms.metrics["tis_weight"].tolist() == pytest.approx([0.5, 2.0])
    assert terms.metrics["tis_cut"].tolist() == [False, True]
    assert terms.metrics["mismatch"].tolist() == pytest.approx([math.log(2), math.log(9)])
    assert terms.metrics["mismatch_kl"].tolist() == pytest.approx(
        [0.5 - 1 + math.log(2), 9 - 1 - math.log(9)]
    )
    assert terms.metrics["kl"].tolist() == [0.0, 0.0]
    assert metric_sums(terms) == pytest.approx(
        {
            "clip_fraction": 1.0,
            "loss": -1.2 * 0.5 - 2.0,
            "kl": 0.0,
            "mismatch": math.log(2) + math.log(9),
            "mismatch_kl": 7.5 - math.log(4.5),
            "tis_weight": 2.5,
            "tis_cut": 1.0,
            "entropy": 2.0,
        }
    )


def test_what_has_no_advantage_learns_only_from_the_kl_or_a_users_loss() -> None:
    assert objective().learns(rewarded=True)
    assert not objective().learns(rewarded=False)
    assert objective(kl_coef=0.1).learns(rewarded=False)
    assert objective(loss="tests.token_batches:square").learns(rewarded=False)


def test_a_users_loss_is_minimised_as_it_is_with_weight_and_kl_off() -> None:
    tokens = make_tokens(ratios=[2.0, 4.0], rollout=[0.1, 0.9])
    terms = objective(loss="tests.token_batches:square", tis_cap=0)(tokens)
    assert terms.per_token.tolist() == pytest.approx([math.log(2) ** 2, 0.0])
    assert terms.metrics["twice"].tolist() == pytest.approx([-2 * math.log(2), 0.0])


def test_a_users_function_that_is_no_loss_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"train\.loss: .*:no_loss returned Tensor; return a Tok"):
        objective(loss="tests.token_batches:no_loss")
    with pytest.raises(
        ConfigError, match=r"math:sqrt failed on a trial of three tokens: TypeError"
    ):
        objective(loss="math:sqrt")


@pytest.mark.parametrize("loss", LOSSES)
def test_tokens_without_an_advantage_have_no_gradient(loss: str) -> None:
    """So that a micro-batch without any may be left out of the backward pass."""
    tokens = make_tokens(ratios=[1.5, 0.5], advantages=[0.0, 0.0])
    assert gradient(tokens, objective(loss=loss)(tokens)) == [0.0, 0.0]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_micro_batch_without_samples_adds_nothing(loss: str) -> None:
    tokens = make_tokens(lengths=[])
    terms = objective(loss=loss, tis_level="sequence")(tokens)
    assert (tokens.weights * terms.per_token).sum().item() == 0.0
    assert set(metric_sums(terms).values()) == {0.0}
