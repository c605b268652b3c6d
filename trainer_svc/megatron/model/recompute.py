"""A layer that keeps its input alone, and computes the rest once more for its backward pass."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class RecomputedLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron's layer without its activations: memory for a third more time.

    Megatron's own recomputation draws on CUDA's generators, and finds no gradient of a layer whose
    input has none: the first one, whose input comes from a frozen embedding.
    """

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As the layer; dropout falls the same way both times."""
        if not torch.is_grad_enabled():
            outputs: tuple[Tensor, Tensor | None] = super().forward(*args, **kwargs)
            return outputs
        # To the end, so that ranks which hold other experts go through the same collectives.
        outputs = checkpoint(
            super().forward, *args, use_reentrant=False, early_stop=False, **kwargs
        )
        return outputs
