"""What the policy says of each token: its log-probability, and the entropy it was drawn with."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_ELEMENTS = 1 << 20
"""Logits that are looked at together: few enough to stay in a cache, enough to share out."""


class TokenScores(NamedTuple):
    """Both of shape (num_tokens,), float32; only `logprobs` carries a gradient."""

    logprobs: Tensor
    entropy: Tensor


def token_scores(logits: Tensor, tokens: Tensor, *, temperature: float) -> TokenScores:
    """Log-probability of each token under softmax(logits / temperature), and that entropy in nats.

    This is the distribution the rollout samples from, so both sides' values can be compared. One
    pass gives both; beside the logits there is one (num_tokens, vocab) tensor, the probabilities,
    and that only where a gradient is asked for: it becomes the gradient.

    Args:
        logits: (num_tokens, vocab).
        tokens: (num_tokens,), int64.
        temperature: above 0.
    """
    scores = _Scores.apply(logits, tokens, temperature)  # type: ignore[no-untyped-call]
    return TokenScores(*scores)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> Any:
        count, vocab = logits.shape
        logprobs = torch.empty(count, dtype=torch.float32, device=logits.device)
        entropy = torch.empty_like(logprobs)
        kept = ctx.needs_input_grad[0]
        probs = torch.empty(count if kept else 0, vocab, dtype=torch.float32, device=logits.device)
        rows = max(1, _CHUNK_ELEMENTS // vocab)
        for start in range(0, count, rows):
            part = slice(start, start + rows)
            # In float32 and below 0, so that nothing overflows.
            scaled = logits[part].float() / temperature
            scaled -= scaled.amax(dim=1, keepdim=True)
            p = torch.exp(scaled, out=probs[part] if kept else None)
            total = p.sum(dim=1, keepdim=True)
            p /= total
            log_total = total.log().squeeze(1)
            logprobs[part] = scaled.gather(1, tokens[part, None]).squeeze(1) - log_total
            entropy[part] = log_total - torch.linalg.vecdot(p, scaled)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.save_for_backward(probs, tokens)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        """d log p(token) / d logits = (one-hot(token) - p) / temperature."""
        probs, tokens = ctx.saved_tensors
        scale = (grad / ctx.temperature)[:, None]
        found = probs.mul_(-scale).scatter_add_(1, tokens[:, None], scale)
        return found.to(ctx.dtype), None, None
