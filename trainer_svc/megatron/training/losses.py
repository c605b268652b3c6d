"""Loss functions: plain functions of a micro-batch's tokens, found by name.

One of your own has the same signature, returns the loss of every token and whatever per-token
values you want to see as metrics::

    def loss(tokens: TokenBatch, settings: TrainSettings) -> TokenLoss:
        return TokenLoss(-tokens.advantages * tokens.logprobs, {"surprise": -tokens.old_logprobs})

What is minimised is that loss times the importance weight of `train.tis_cap`, plus the KL term of
`train.kl_coef`; both are off at 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.errors import ConfigError
from trainer_svc.megatron.training.settings import TrainSettings
from trainer_svc.megatron.training.tokens import TokenBatch, TokenLoss, sample_mean
from trainer_svc.rl.data import load_function

LossFunction = Callable[[TokenBatch, TrainSettings], TokenLoss]

_MAX_LOG_RATIO = 20.0
"""Keeps ratios finite: an infinite one times no gradient is not a number."""


def clipped_ratio(tokens: TokenBatch, settings: TrainSettings) -> TokenLoss:
    """`grpo`, `ppo`: -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A).

    Sources: PPO (arXiv 1707.06347), equation 7; two clip distances as in DAPO (arXiv 2503.14476),
    section 3.1. With `clip_ratio_c` and A < 0 no more than -c * A: dual clip (arXiv 1912.09729).
    GRPO and Dr. GRPO differ from PPO in the advantages and in the aggregation alone.
    """
    ratio = _exp(tokens.logprobs - tokens.old_logprobs)
    return _clipped(ratio, tokens.advantages, settings, highest=settings.clip_ratio_c)


def gspo(tokens: TokenBatch, settings: TrainSettings) -> TokenLoss:
    """`gspo`: the clipped ratio of whole sequences, exp(mean over tokens of the log ratio).

    Source: GSPO (arXiv 2507.18071), equations 5 and 7, in the form per token of equation 14: each
    token has its sequence's ratio as value and its own log-probability as gradient. Summed with
    `sample_mean`, the default here, value and gradient are those of equation 5.
    """
    log_ratio = sample_mean((tokens.logprobs - tokens.old_logprobs).detach(), tokens)
    ratio = _exp(log_ratio) * (tokens.logprobs - tokens.logprobs.detach()).exp()
    return _clipped(ratio, tokens.advantages, settings)


def cispo(tokens: TokenBatch, settings: TrainSettings) -> TokenLoss:
    """`cispo`: -clip(ratio, 1 - low, 1 + high) * A * log p, with no gradient through the ratio.

    Source: CISPO (MiniMax-M1, arXiv 2506.13585), equations 4 and 5. No token is cut off from the
    gradient; `clip_fraction` counts those whose weight the clip changed.
    """
    ratio = _exp(tokens.logprobs - tokens.old_logprobs).detach()
    weight = ratio.clamp(*settings.clip_bounds)
    return TokenLoss(
        -weight * tokens.advantages * tokens.logprobs, {"clip_fraction": weight != ratio}
    )


def reinforce(tokens: TokenBatch, settings: TrainSettings) -> TokenLoss:
    """`reinforce`: -ratio * A, the policy gradient with importance sampling and without a clip.

    Source: REINFORCE (Williams 1992); where the ratio is 1 its gradient is that of -A * log p.
    """
    return TokenLoss(-_exp(tokens.logprobs - tokens.old_logprobs) * tokens.advantages)


def cross_entropy(tokens: TokenBatch, settings: TrainSettings) -> TokenLoss:
    """`cross_entropy`: -A * log p. The advantage is the sample's weight, 1 in the warm start."""
    return TokenLoss(-tokens.advantages * tokens.logprobs)


_FUNCTIONS: dict[str, LossFunction] = {
    "grpo": clipped_ratio,
    "ppo": clipped_ratio,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "cross_entropy": cross_entropy,
}


def find_loss(name: str) -> LossFunction:
    """A loss of this module by its name, or a user's own, checked at every call.

    Raises:
        ConfigError: there is no such function.
    """
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    function: LossFunction = load_function(name, field="train.loss")

    def checked(tokens: TokenBatch, settings: TrainSettings) -> TokenLoss:
        found = function(tokens, settings)
        _check(found, name=name, count=len(tokens.logprobs))
        return found

    return checked


def _check(found: object, *, name: str, count: int) -> None:
    if not isinstance(found, TokenLoss):
        raise ConfigError(f"train.loss: {name} returned {type(found).__name__}; return a TokenLoss")
    for key, value in {"per_token": found.per_token, **found.metrics}.items():
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if shape != (count,):
            raise ConfigError(
                f"train.loss: {name} returned {key} of {shape}; return a tensor of ({count},), "
                "a value for every token"
            )


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=_MAX_LOG_RATIO).exp()


def _clipped(
    ratio: Tensor, advantages: Tensor, settings: TrainSettings, *, highest: float | None = None
) -> TokenLoss:
    """The pessimistic one of both objectives; `clip_fraction` is where it has no gradient."""
    plain = ratio * advantages
    objective = torch.minimum(plain, ratio.clamp(*settings.clip_bounds) * advantages)
    if highest is not None:
        objective = torch.where(advantages < 0, objective.maximum(highest * advantages), objective)
    return TokenLoss(-objective, {"clip_fraction": objective.detach() != plain.detach()})
