"""Per-token estimates of KL(policy || reference), and what minimising them does."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer_svc.megatron.training.settings import KlEstimator

_MAX_LOG_RATIO = 20.0
"""Keeps exponentials finite; e^20 is beyond any ratio worth following."""


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """log(policy / reference): unbiased, of high variance, may be negative (Schulman 2020)."""
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """log(policy / reference)^2 / 2: biased, of low variance (Schulman 2020)."""
    return (logprobs - reference_logprobs).square() / 2


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """r - 1 - log r, r = reference / policy: unbiased, never below zero (Schulman 2020).

    GRPO (arXiv 2402.03300), equation 4.
    """
    log_ratio = (reference_logprobs - logprobs).clamp(max=_MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def kl_loss(logprobs: Tensor, reference_logprobs: Tensor, *, estimator: KlEstimator) -> Tensor:
    """The KL term of the loss for every token, (num_tokens,).

    An estimator whose mean is the KL need not have a gradient whose mean is the KL's. Over tokens
    of the policy itself the mean gradient is

    - of k1: zero, nothing but noise, so `k1` has its value and k2's gradient;
    - of k2: that of KL(policy || reference), exactly; so `k2` is as it is;
    - of k3: that of KL(reference || policy). `k3` is as it is all the same: it is GRPO's term;
    - `k3+` has k3's value and k2's gradient.

    All of a token's own term: what a token does to those after it is left out, as in GRPO.

    Sources: J. Schulman, "Approximating KL Divergence" (2020), for the values; Tang and Munos,
    "On a few pitfalls in KL divergence gradient estimation for RL" (arXiv 2506.09477), for the
    gradients. verl calls these `k1+`, `k2` (`mse`), `k3` (`low_var_kl`) and `k3+`.
    """
    match estimator:
        case "k1":
            return _straight_through(k1(logprobs, reference_logprobs), logprobs, reference_logprobs)
        case "k2":
            return k2(logprobs, reference_logprobs)
        case "k3":
            return k3(logprobs, reference_logprobs)
        case "k3+":
            return _straight_through(k3(logprobs, reference_logprobs), logprobs, reference_logprobs)


def _straight_through(value: Tensor, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """`value` with the gradient of k2, which is log(policy / reference) d logprobs."""
    slope = k1(logprobs, reference_logprobs).detach()
    return value.detach() + slope * (logprobs - logprobs.detach())
