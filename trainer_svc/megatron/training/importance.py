"""Importance weights between what the trainer and the rollout say of a sample's tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer_svc.megatron.training.settings import TrainSettings
from trainer_svc.megatron.training.tokens import TokenBatch, sample_sum

_MAX_LOG_RATIO = 20.0
"""Keeps the weight finite before it is cut."""


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """Both (num_tokens,) and without gradient; `cut` are those the bounds changed."""

    weight: Tensor
    cut: Tensor


def importance_weights(tokens: TokenBatch, *, settings: TrainSettings) -> ImportanceWeights:
    """trainer / rollout, of a token or of its whole sample, within bounds.

    They correct for samples of an older version, and for the rollout's other arithmetic alike.

    - `truncate`: min(w, cap). Truncated importance sampling (Ionides 2008), for a rollout's
      arithmetic Yao et al., "Your efficient RL framework secretly brings you off-policy RL
      training" (2025).
    - `mask`: w where floor <= w <= cap, else 0, so that the token is not learnt from. Of tokens
      that is IcePop (arXiv 2510.18855), of sequences masked importance sampling (Liu et al., "When
      speed kills stability", 2025). The mean over tokens still counts what is masked.

    A sequence's weight is the product of its tokens'.
    """
    log_ratio = (tokens.trainer_logprobs - tokens.rollout_logprobs).detach()
    if settings.tis_cap == 0:
        return ImportanceWeights(torch.ones_like(log_ratio), torch.zeros_like(log_ratio))
    if settings.tis_level == "sequence":
        log_ratio = sample_sum(log_ratio, tokens)
    ratio = log_ratio.clamp(max=_MAX_LOG_RATIO).exp()
    if settings.tis_mode == "truncate":
        return ImportanceWeights(ratio.clamp(max=settings.tis_cap), ratio > settings.tis_cap)
    outside = (ratio > settings.tis_cap) | (ratio < settings.tis_floor)
    return ImportanceWeights(ratio.masked_fill(outside, 0.0), outside)
