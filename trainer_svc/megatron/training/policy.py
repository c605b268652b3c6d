"""Log-probabilities and loss of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from trainer_svc.megatron.model.build import hidden_states, output_logits
from trainer_svc.megatron.settings import TrainSettings
from trainer_svc.megatron.training import objective
from trainer_svc.megatron.training.batching import MicroBatch


def completion_logprobs(model: GPTModel, micro: MicroBatch, *, temperature: float) -> Tensor:
    """Log-probability of every completion token: (num_tokens,), float32.

    Logits exist for completion tokens alone: over the whole batch they would outweigh all else.
    """
    hidden = hidden_states(model, micro.tokens)
    logits = output_logits(model, hidden[micro.positions, micro.rows])
    return objective.token_logprobs(logits, micro.targets, temperature=temperature)


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """Per-token values of one micro-batch, each (num_tokens,); `loss` carries the gradient."""

    loss: Tensor
    kl: Tensor
    clip_fraction: Tensor
    mismatch: Tensor
    mismatch_kl: Tensor
    tis_weight: Tensor

    def sums(self) -> Tensor:
        """Sum of every field in order, float64: (6,)."""
        values = [getattr(self, field.name).detach() for field in fields(self)]
        return torch.stack([value.double().sum() for value in values])


METRIC_NAMES = tuple(field.name for field in fields(TokenTerms))


def token_terms(
    micro: MicroBatch,
    logprobs: Tensor,
    *,
    sampled: Tensor | None,
    on_policy: bool,
    reference: Tensor | None,
    settings: TrainSettings,
) -> TokenTerms:
    """The loss of every token and what is reported of it.

    Source: the decoupled objective of Hilton et al. (arXiv 2110.00641), as AReaL (arXiv 2505.24298)
    has it. The ratio that is clipped is taken against the policy before the step; that policy's
    truncated weight against the rollout's own log-probabilities corrects for samples of an older
    version, and for the rollout's other arithmetic alike.

    Args:
        logprobs: of the current policy, with gradient.
        sampled: of the policy before the step, which sampled unless the samples are stale; without
            dropout. None means `logprobs` are those.
        on_policy: the current policy is the one before the step, so that every ratio is 1.
        reference: of the base model; None leaves the KL term out.
    """
    current = logprobs.detach()
    sampled = current if sampled is None else sampled
    policy = objective.policy_loss(
        logprobs,
        current if on_policy else sampled,
        micro.advantages,
        clip_low=settings.clip_ratio,
        clip_high=settings.clip_ratio_high or settings.clip_ratio,
    )
    weight = torch.ones_like(sampled)
    if settings.tis_cap > 0:
        weight = objective.tis_weights(sampled, micro.rollout_logprobs, cap=settings.tis_cap)
    kl = torch.zeros_like(sampled)
    if reference is not None:
        kl = objective.kl_k3(logprobs, reference)
    return TokenTerms(
        loss=weight * policy.per_token + settings.kl_coef * kl,
        kl=kl,
        clip_fraction=policy.clipped,
        mismatch=(sampled - micro.rollout_logprobs).abs(),
        mismatch_kl=objective.kl_k3(micro.rollout_logprobs, sampled),
        tis_weight=weight,
    )
