"""What a step minimises: a loss function, its importance weight and the KL term."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.errors import ConfigError
from trainer_svc.megatron.training.aggregation import token_weights
from trainer_svc.megatron.training.importance import importance_weights
from trainer_svc.megatron.training.kl import k3, kl_loss
from trainer_svc.megatron.training.losses import find_loss
from trainer_svc.megatron.training.settings import LOSSES, TrainSettings
from trainer_svc.megatron.training.tokens import TokenBatch, TokenLoss

_USERS_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError),
    *(RuntimeError, TypeError, ValueError),
)
"""What a function raises that does not fit."""


class Objective:
    """The objective of one run.

        objective = Objective(settings.train)
        weights = objective.weights([len(s.completion_ids) for s in minibatch])  # of the whole one
        for tokens in micro_batches:
            terms = objective(tokens)
            (tokens.weights * terms.per_token).sum().backward()

    Raises:
        ConfigError: `train.loss` names no function, or one that returns no loss of every token.
    """

    def __init__(self, settings: TrainSettings) -> None:
        self._settings = settings
        self._loss = find_loss(settings.loss)
        # A user's function shows here whether it can be used, on every rank, before any rollout.
        try:
            self._loss(_trial(), settings)
        except _USERS_ERRORS as error:
            raise ConfigError(
                f"train.loss: {settings.loss} failed on a trial of three tokens: "
                f"{type(error).__name__}: {error}"
            ) from error

    @property
    def needs_reference(self) -> bool:
        """Whether `reference_logprobs` must be given."""
        return self._settings.kl_coef > 0

    def learns(self, *, rewarded: bool) -> bool:
        """Whether a micro-batch has a gradient; `rewarded`: any of its advantages is not 0.

        Without one the losses of this package have none; of a user's nobody knows.
        """
        return rewarded or self.needs_reference or self._settings.loss not in LOSSES

    def weights(self, lengths: Sequence[int]) -> list[float]:
        """The weight of every token of each sample of a minibatch; see `token_weights`."""
        return token_weights(
            lengths, aggregation=self._settings.weighting, max_tokens=self._settings.max_tokens
        )

    def __call__(self, tokens: TokenBatch) -> TokenLoss:
        """The whole loss of every token, and what is reported of it.

        weight * loss + kl_coef * kl. Source: the decoupled objective of Hilton et al. (arXiv
        2110.00641), as AReaL (arXiv 2505.24298) has it: the loss's ratio is taken against the
        policy before the step; that policy's bounded weight against the rollout's own
        log-probabilities corrects for what made the sample.

        Metrics, beside the loss function's own: `loss`; `kl` to the base; `mismatch`, the absolute
        difference of the trainer's and the rollout's log-probabilities; `mismatch_kl`, the k3
        estimate of KL(rollout || trainer); `tis_weight`; `tis_cut`, the share of weights beyond
        their bounds; `entropy` in nats, if it was given.
        """
        found = self._loss(tokens, self._settings)
        weights = importance_weights(tokens, settings=self._settings)
        kl = torch.zeros_like(tokens.logprobs)
        if tokens.reference_logprobs is not None:
            kl = kl_loss(
                tokens.logprobs, tokens.reference_logprobs, estimator=self._settings.kl_estimator
            )
        per_token = weights.weight * found.per_token + self._settings.kl_coef * kl
        trainer, rollout = tokens.trainer_logprobs, tokens.rollout_logprobs
        own = {
            "loss": per_token,
            "kl": kl,
            "mismatch": (trainer - rollout).abs(),
            "mismatch_kl": k3(rollout, trainer),
            "tis_weight": weights.weight,
            "tis_cut": weights.cut,
        }
        if tokens.entropy is not None:
            own["entropy"] = tokens.entropy
        return TokenLoss(per_token, {**found.metrics, **own})


def metric_sums(terms: TokenLoss) -> dict[str, float]:
    """The sum of every metric over the tokens, in float64: add them up, then divide."""
    sums = [values.detach().double().sum() for values in terms.metrics.values()]
    return dict(zip(terms.metrics, torch.stack(sums).tolist(), strict=True))


def _trial() -> TokenBatch:
    """Two samples, of two tokens and of one."""
    logprobs = torch.full((3,), -1.0)
    return TokenBatch(
        logprobs=logprobs.clone().requires_grad_(),
        old_logprobs=logprobs,
        trainer_logprobs=logprobs,
        rollout_logprobs=logprobs,
        advantages=torch.tensor([1.0, 1.0, -1.0]),
        weights=torch.full((3,), 1 / 3),
        sample=torch.tensor([0, 0, 1]),
        num_samples=2,
        reference_logprobs=logprobs,
        entropy=-logprobs,
    )
