from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trainer_svc.megatron.training import objective


def log(*values: float) -> Tensor:
    return torch.tensor([math.log(value) for value in values])


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_token_logprobs_are_of_the_tempered_distribution(temperature: float) -> None:
    """faults.md 18: the raw distribution's values were used at temperature 0.7."""
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 4.0]])
    found = objective.token_logprobs(logits, torch.tensor([2, 0]), temperature=temperature)
    expected = [
        3 / temperature - math.log(sum(math.exp(x / temperature) for x in (1, 2, 3))),
        0 / temperature - math.log(sum(math.exp(x / temperature) for x in (0, -1, 4))),
    ]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_token_logprobs_are_float32_for_bfloat16_logits() -> None:
    logits = torch.randn(3, 50).bfloat16()
    found = objective.token_logprobs(logits, torch.tensor([1, 2, 3]), temperature=0.7)
    assert found.dtype is torch.float32


def test_policy_loss_clips_only_what_would_go_too_far() -> None:
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0])
    ratios = log(1.5, 0.5, 1.5, 0.5, 1.1).requires_grad_()
    loss = objective.policy_loss(ratios, torch.zeros(5), advantages, clip_low=0.2, clip_high=0.28)
    assert loss.per_token.tolist() == pytest.approx([-1.28, -0.5, 1.5, 0.8, -2.2])
    assert loss.clipped.tolist() == [True, False, False, True, False]
    torch.autograd.backward(loss.per_token.sum())
    assert ratios.grad is not None
    assert ratios.grad.tolist() == pytest.approx([0.0, -0.5, 1.5, 0.0, -2.2])


def test_on_policy_gradient_is_minus_the_advantage() -> None:
    logprobs = log(0.3, 0.6).requires_grad_()
    loss = objective.policy_loss(
        logprobs, logprobs.detach(), torch.tensor([2.0, -3.0]), clip_low=0.2, clip_high=0.2
    )
    torch.autograd.backward(loss.per_token.sum())
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-2.0, 3.0]
    assert not loss.clipped.any()


def test_k3_is_the_stated_estimator() -> None:
    found = objective.kl_k3(log(0.5, 0.2, 0.4), log(0.25, 0.4, 0.4))
    expected = [0.5 - 1 - math.log(0.5), 2 - 1 - math.log(2), 0.0]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_tis_weight_is_the_ratio_up_to_its_cap() -> None:
    found = objective.tis_weights(log(0.4, 0.9, 0.5), log(0.5, 0.1, 0.5), cap=2.0)
    assert found.tolist() == pytest.approx([0.8, 2.0, 1.0])


def test_every_token_of_a_batch_weighs_the_same() -> None:
    long, short = torch.ones(9), torch.full((1,), 11.0)
    parts = [objective.token_mean(part, total_tokens=10) for part in (long, short)]
    assert sum(parts).item() == 2.0  # type: ignore[union-attr]
