"""Forward passes of one rank's part of the model over one row of tokens."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from torch import Tensor

from trainer_svc.megatron.model.wide_product import wide_product


def hidden_states(model: GPTModel, tokens: Tensor, *, layout: Tensor) -> Tensor:
    """Final hidden states (T, 1, hidden), before the logits, of a row of token ids (T,).

    Of a pipeline's stage but the last: what the next one takes as its input. Of any but the first:
    `model.set_input_tensor` comes before.

    Args:
        layout: how the row is made up of sequences; see `layout.py`.
    """
    embedded = None
    if model.pre_process:
        embedded = model.embedding(input_ids=tokens[None], position_ids=None)
    # Latent attention has its rotary embedding inside.
    latent = model.config.multi_latent_attention
    rotary = None if latent else model.rotary_pos_emb.at(layout)
    hidden: Tensor = model.decoder(
        hidden_states=embedded, attention_mask=layout, rotary_pos_emb=rotary
    )
    if model.post_process and model.config.sequence_parallel:
        # The loss is the same on all ranks, so each takes its own part of the gradient.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    return hidden


def output_logits(model: GPTModel, hidden: Tensor) -> Tensor:
    """Logits (..., vocab) in float32 of hidden states (..., hidden), over the whole vocabulary.

    The product itself is in float32: logits reach 30, where bfloat16 has steps of 1/8, and that
    rounding is most of what trainer and rollout disagree about (arXiv 2506.13585, section 3.2).
    """
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    copied = copy_to_tensor_model_parallel_region(hidden.flatten(0, -2))
    logits: Tensor = gather_from_tensor_model_parallel_region(wide_product(copied, weight))
    return logits.view(*hidden.shape[:-1], logits.shape[-1])
