"""The router of a mixture of experts, exactly as the Hugging Face models choose."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn.functional import linear

from trainer_svc.megatron.model.base_config import Routing


class Router(TopKRouter):  # type: ignore[misc]
    """Megatron's, with arithmetic of its own.

    Megatron's scores a group by its best `top_k // top_groups` experts, and always normalizes
    sigmoid scores; its product needs Transformer Engine (0.16.1).
    """

    def __init__(self, *, routing: Routing, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.choice = routing

    def gating(self, hidden: Tensor) -> Tensor:
        """Logits (T, 1, experts) in float32 of (T, 1, hidden)."""
        return linear(hidden.float(), self.weight.float())

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights and choice (tokens, experts) of logits (T, 1, experts)."""
        flat = logits.flatten(0, -2)
        return choose_experts(flat, self.choice, top_k=self.topk, bias=self.expert_bias)


def choose_experts(
    logits: Tensor, routing: Routing, *, top_k: int, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weights (tokens, experts), 0 where an expert is not chosen, and the choice as booleans."""
    wide = logits.float()
    scores = wide.softmax(dim=-1) if routing.score == "softmax" else wide.sigmoid()
    preferences = scores if bias is None else scores + bias
    if routing.groups > 1:
        preferences = _best_groups(preferences, routing)
    chosen = preferences.topk(top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if routing.normalize:
        # Sigmoids may all be zero: DeepSeek-V3's own guard.
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    weights = (weights * routing.scale).to(logits.dtype)
    return (
        torch.zeros_like(logits).scatter(1, chosen, weights),
        torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True),
    )


def _best_groups(scores: Tensor, routing: Routing) -> Tensor:
    """Scores (tokens, experts) with those outside of the best groups at -inf."""
    grouped = scores.view(len(scores), routing.groups, -1)
    of_group = grouped.topk(routing.group_top, dim=-1).values.sum(dim=-1)
    best = of_group.topk(routing.top_groups, dim=-1).indices
    outside = torch.ones_like(of_group, dtype=torch.bool).scatter(1, best, False)
    return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1)
