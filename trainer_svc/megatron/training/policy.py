"""What the policy says of a micro-batch's completion tokens, and what the objective gets of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from trainer_svc.megatron.model.forward import output_logits
from trainer_svc.megatron.training.packing import MicroBatch
from trainer_svc.megatron.training.scores import TokenScores, token_scores
from trainer_svc.megatron.training.tokens import TokenBatch


def completion_scores(
    model: GPTModel, hidden: Tensor, micro: MicroBatch, *, temperature: float
) -> TokenScores:
    """Scores of every completion token from the row's final hidden states (T, 1, hidden).

    Logits exist for completion tokens alone: over the whole row they would outweigh all else.
    """
    logits = output_logits(model, hidden[micro.sources, 0])
    return token_scores(logits, micro.targets, temperature=temperature)


def token_batch(
    micro: MicroBatch,
    scores: TokenScores,
    *,
    sampled: Tensor | None,
    reference: Tensor | None,
    on_policy: bool,
    weights: Sequence[float],
) -> TokenBatch:
    """What the objective looks at.

    Args:
        scores: of the current policy, with gradient.
        sampled: log-probabilities of the policy before the step, without dropout. None means the
            current ones are those.
        reference: those of the base model, where the objective needs them.
        on_policy: the current policy is the one before the step, so that every ratio is 1.
        weights: of a token of every sample of the sequence that was packed.
    """
    current = scores.logprobs.detach()
    sampled = current if sampled is None else sampled
    lengths = torch.tensor(micro.lengths, dtype=torch.int64)
    own = torch.tensor([weights[index] for index in micro.order])
    return TokenBatch(
        logprobs=scores.logprobs,
        old_logprobs=current if on_policy else sampled,
        trainer_logprobs=sampled,
        rollout_logprobs=micro.rollout_logprobs,
        advantages=micro.advantages,
        weights=own.repeat_interleave(lengths).to(current.device),
        sample=torch.arange(len(lengths)).repeat_interleave(lengths).to(current.device),
        num_samples=len(lengths),
        reference_logprobs=reference,
        entropy=scores.entropy,
    )
