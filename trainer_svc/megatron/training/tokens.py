"""What a loss gets and what it gives: flat values, one for each completion token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Completion tokens of one micro-batch, sample after sample, whole samples only.

    All tensors but `sample` are float32, and all of shape (num_tokens,). Only `logprobs` carries a
    gradient. Of a fresh sample `trainer_logprobs` and `rollout_logprobs` are of one policy, as
    either side computed it; of a stale one the rollout's are of the version that made it.

    Attributes:
        logprobs: of the policy under training.
        old_logprobs: what its ratio is taken against. In a step's only update `logprobs` without
            gradient; where a step makes several, `trainer_logprobs`.
        trainer_logprobs: of the policy before the step, without dropout.
        rollout_logprobs: as they came with the sample; zeros where no rollout made it.
        advantages: of the token's sample.
        weights: the token's share in the minibatch's loss; see `aggregation.py`.
        sample: int64, the token's sample: 0 for the first of this micro-batch.
        num_samples: how many there are.
        reference_logprobs: of the base model; None where nothing needs them.
        entropy: of the distribution the token was drawn from, in nats.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    trainer_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    sample: Tensor
    num_samples: int
    reference_logprobs: Tensor | None = None
    entropy: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """What a loss function returns.

    Attributes:
        per_token: (num_tokens,), with gradient; its sum weighted by `weights` is minimised.
        metrics: name to values (num_tokens,), reported as means over a step's completion tokens.
    """

    per_token: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


def sample_sum(values: Tensor, tokens: TokenBatch) -> Tensor:
    """The sum of (num_tokens,) values over the token's sample, at every token: (num_tokens,)."""
    sums = values.new_zeros(tokens.num_samples).index_add(0, tokens.sample, values)
    return sums[tokens.sample]


def sample_mean(values: Tensor, tokens: TokenBatch) -> Tensor:
    """The mean of (num_tokens,) values over the token's sample, at every token: (num_tokens,)."""
    return sample_sum(values, tokens) / sample_sum(values.new_ones(values.shape), tokens)
