"""Small token batches with chosen values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer_svc.megatron.training.settings import TrainSettings
from trainer_svc.megatron.training.tokens import TokenBatch, TokenLoss


def logs(values: Sequence[float]) -> Tensor:
    return torch.tensor([math.log(value) for value in values])


def make_tokens(
    *,
    ratios: Sequence[float] = (),
    advantages: Sequence[float] = (),
    lengths: Sequence[int] | None = None,
    trainer: Sequence[float] | None = None,
    rollout: Sequence[float] | None = None,
    reference: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
    old: float = 0.25,
) -> TokenBatch:
    """Tokens whose probability is `old` times their ratio; all else is given as probabilities.

    Without `lengths` each token is a sample of its own.
    """
    count = len(ratios)
    counts = torch.tensor([1] * count if lengths is None else lengths, dtype=torch.int64)
    before = [old] * count
    return TokenBatch(
        logprobs=logs([old * ratio for ratio in ratios]).requires_grad_(),
        old_logprobs=logs(before),
        trainer_logprobs=logs(before if trainer is None else trainer),
        rollout_logprobs=logs(before if rollout is None else rollout),
        advantages=torch.tensor(advantages or [1.0] * count),
        weights=torch.tensor(weights or [1.0] * count),
        sample=torch.arange(len(counts)).repeat_interleave(counts),
        num_samples=len(counts),
        reference_logprobs=None if reference is None else logs(reference),
    )


def gradient(tokens: TokenBatch, loss: TokenLoss) -> list[float]:
    """Of the weighted sum, by the log-probabilities."""
    (found,) = torch.autograd.grad((tokens.weights * loss.per_token).sum(), tokens.logprobs)
    return [float(value) for value in found]


def square(tokens: TokenBatch, settings: TrainSettings) -> TokenLoss:
    """A loss of a user's own."""
    return TokenLoss(tokens.logprobs.square(), {"twice": 2 * tokens.logprobs})


def no_loss(tokens: TokenBatch, settings: TrainSettings) -> Tensor:
    """What a user may take for one."""
    return tokens.logprobs.sum()
