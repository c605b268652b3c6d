"""DeepSeek's multi-head latent attention over rows of tokens with layouts."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from trainer_svc.megatron.model.rotary import LatentRotary

# It takes stand-ins for Transformer Engine's classes for the real ones (megatron-core 0.16.1).
multi_latent_attention.HAVE_TE = HAVE_TE


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron's, with positions from the layout that comes as its attention mask."""

    def __init__(self, *args: Any, rotary: LatentRotary, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb = rotary

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Output and bias of (T, 1, hidden); recomputation comes through here again."""
        self.rotary_pos_emb.layout = attention_mask
        # Not for good, since an adapter may come to wrap the linear.
        hook = self.linear_kv_down_proj.register_forward_hook(self._whole_latent)
        try:
            output: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states, attention_mask, **kwargs
            )
        finally:
            hook.remove()
        return output

    def _whole_latent(self, _: Any, __: Any, found: tuple[Tensor, Tensor | None]) -> Any:
        """The latent vector gathered over tensor-parallel ranks, if it is split.

        Each of them uses the whole rotated key with its own heads, so that key's gradient is a sum
        over the ranks. Megatron's own gathering (megatron-core 0.16.1) drops the other ranks' part.
        """
        latent, bias = found
        group = self.pg_collection.tp
        if group.size() == 1:
            return None
        latent = gather_from_tensor_model_parallel_region(latent, group=group)
        if self.config.sequence_parallel:
            # Megatron gathers the rotated key over the tokens then, and sums its gradient.
            return scatter_to_sequence_parallel_region(latent, group=group), bias
        values, key = latent.split(
            [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1
        )
        key = copy_to_tensor_model_parallel_region(key, group=group)
        return torch.cat([values, key], dim=-1), bias
