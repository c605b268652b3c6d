"""KL estimators: their values, and what their gradients are on average."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.token_batches import logs
from trainer_svc.megatron.training.kl import k1, k2, k3, kl_loss
from trainer_svc.megatron.training.settings import KlEstimator

ALL: tuple[KlEstimator, ...] = ("k1", "k2", "k3", "k3+")


def test_values_are_the_stated_estimators() -> None:
    policy, reference = logs([0.5, 0.2, 0.4]), logs([0.25, 0.4, 0.4])
    assert k1(policy, reference).tolist() == pytest.approx([math.log(2), -math.log(2), 0.0])
    half_square = math.log(2) ** 2 / 2
    assert k2(policy, reference).tolist() == pytest.approx([half_square, half_square, 0.0])
    third = [0.5 - 1 - math.log(0.5), 2 - 1 - math.log(2), 0.0]
    assert k3(policy, reference).tolist() == pytest.approx(third, abs=1e-6)


@pytest.mark.parametrize("estimator", ALL)
def test_the_loss_has_its_estimators_value(estimator: KlEstimator) -> None:
    policy, reference = logs([0.5, 0.2, 0.4]), logs([0.25, 0.4, 0.4])
    value = {"k1": k1, "k2": k2, "k3": k3, "k3+": k3}[estimator]
    found = kl_loss(policy, reference, estimator=estimator)
    assert torch.equal(found, value(policy, reference))


@pytest.mark.parametrize(
    ("estimator", "slopes"),
    [
        ("k1", [math.log(2), -math.log(2)]),
        ("k2", [math.log(2), -math.log(2)]),
        ("k3", [1 - 0.5, 1 - 2.0]),
        ("k3+", [math.log(2), -math.log(2)]),
    ],
)
def test_gradients_by_the_log_probabilities(estimator: KlEstimator, slopes: list[float]) -> None:
    policy = logs([0.5, 0.2]).requires_grad_()
    torch.autograd.backward(kl_loss(policy, logs([0.25, 0.4]), estimator=estimator).sum())
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx(slopes)


def mean_gradient(estimator: KlEstimator | None, logits: Tensor, reference: Tensor) -> Tensor:
    """By the logits, of the loss averaged over tokens drawn from the policy; None: raw k1."""
    logprobs = torch.log_softmax(logits, dim=0)
    terms = (
        k1(logprobs, reference)
        if estimator is None
        else kl_loss(logprobs, reference, estimator=estimator)
    )
    (found,) = torch.autograd.grad((logprobs.detach().exp() * terms).sum(), logits)
    return found


@pytest.mark.parametrize("estimator", ALL)
def test_mean_gradients_are_those_of_the_stated_divergences(estimator: KlEstimator) -> None:
    """The sum over all tokens of probability times gradient, against autograd of the exact KL."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.randn(6, dtype=torch.float64), dim=0)
    logprobs = torch.log_softmax(logits, dim=0)
    forward = (logprobs.exp() * (logprobs - reference)).sum()
    backward = (reference.exp() * (reference - logprobs)).sum()
    (exact,) = torch.autograd.grad(backward if estimator == "k3" else forward, logits)
    assert torch.allclose(mean_gradient(estimator, logits, reference), exact, atol=1e-12)
    noise = mean_gradient(None, logits, reference)
    assert torch.allclose(noise, torch.zeros_like(noise), atol=1e-12)


@pytest.mark.parametrize("estimator", ALL)
def test_a_reference_far_away_leaves_values_and_gradients_finite(estimator: KlEstimator) -> None:
    policy = torch.tensor([-200.0, 0.0], requires_grad=True)
    found = kl_loss(policy, torch.tensor([0.0, -200.0]), estimator=estimator)
    torch.autograd.backward(found.sum())
    assert policy.grad is not None
    assert found.isfinite().all() and policy.grad.isfinite().all()
