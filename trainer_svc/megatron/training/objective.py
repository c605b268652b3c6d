"""The policy objective as pure functions of per-token tensors of shape (num_tokens,)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def token_logprobs(logits: Tensor, tokens: Tensor, *, temperature: float) -> Tensor:
    """Log-probability of each token under softmax(logits / temperature), in float32.

    This is the distribution the rollout samples from, so both sides' values can be compared.

    Args:
        logits: (num_tokens, vocab).
        tokens: (num_tokens,), int64.
        temperature: above 0.

    Returns:
        (num_tokens,), float32.
    """
    scaled = logits.float() if temperature == 1 else logits.float() / temperature
    return -cross_entropy(scaled, tokens, reduction="none")


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Per-token loss, and which tokens the clip cut off from the gradient."""

    per_token: Tensor
    clipped: Tensor


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) for every token.

    Source: PPO (arXiv 1707.06347), equation 7; two clip distances as in DAPO (arXiv 2503.14476),
    section 3.1. All of shape (num_tokens,); only `logprobs` carries a gradient.
    """
    ratio = (logprobs - old_logprobs).exp()
    plain = ratio * advantages
    limited = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return PolicyLoss(-torch.minimum(plain, limited), limited.detach() < plain.detach())


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) for every token: r - 1 - log r, r = reference / policy.

    Source: J. Schulman, "Approximating KL Divergence" (2020), estimator k3; GRPO
    (arXiv 2402.03300), equation 4. Unbiased, and never below zero.
    """
    log_ratio = reference_logprobs - logprobs
    return torch.expm1(log_ratio) - log_ratio


def tis_weights(trainer_logprobs: Tensor, rollout_logprobs: Tensor, *, cap: float) -> Tensor:
    """min(trainer / rollout, cap) for every token: corrects for what made the sample.

    Source: truncated importance sampling, Yao et al., "Your efficient RL framework secretly brings
    you off-policy RL training" (2025); the truncation is that of Ionides (2008). Of a fresh sample
    both inputs are of one policy, as trainer and as rollout computed it; of a stale one the
    rollout's are of the version that made it.
    """
    return (trainer_logprobs - rollout_logprobs).exp().clamp(max=cap)


def token_mean(per_token: Tensor, *, total_tokens: int) -> Tensor:
    """Sum over these tokens divided by the tokens of the whole batch: every token weighs the same.

    Source: DAPO (arXiv 2503.14476), section 3.3. Micro-batches' values add up to the batch's mean.
    """
    return per_token.sum() / total_tokens
