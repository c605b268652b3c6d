"""The base model: Megatron `GPTModel`s with a Hugging Face directory's weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer_svc.megatron import device
from trainer_svc.megatron.model.architectures import read_base_config
from trainer_svc.megatron.model.base_config import BaseConfig
from trainer_svc.megatron.model.megatron_config import megatron_config
from trainer_svc.megatron.model.rotary import Rotary
from trainer_svc.megatron.model.spec import block_spec
from trainer_svc.megatron.model.weights import load_weights, open_weights
from trainer_svc.megatron.settings import ParallelSettings


@dataclass(frozen=True, slots=True)
class BaseModel:
    """This rank's part of the base: its runs of layers, in the order of their stages."""

    config: BaseConfig
    chunks: tuple[GPTModel, ...]


def build_model(
    model_dir: Path,
    *,
    dtype: torch.dtype,
    parallel: ParallelSettings | None = None,
    recompute: bool = False,
) -> BaseModel:
    """Build this rank's part of the model, frozen, with its weights loaded.

    Needs `parallel.start` with the same settings, which default to one rank. Stored weights
    convert to `dtype` by one rounding, or exactly where `dtype` is as wide. Logits come gathered
    over the tensor-parallel ranks. `recompute` keeps only each layer's input for the backward
    pass.

    Raises:
        ConfigError: the directory is missing or incomplete, holds an unknown model, or does not
            split over the ranks.
    """
    parallel = parallel or ParallelSettings()
    base = read_base_config(model_dir)
    config = megatron_config(base, dtype=dtype, parallel=parallel)
    # The base draws no random numbers; Megatron's default asks CUDA for their states.
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    runs = parallel.virtual_pipeline_size
    stages = range(runs) if runs > 1 else (None,)
    chunks = tuple(
        _build_chunk(base, config, vp_stage=stage, recompute=recompute) for stage in stages
    )
    with open_weights(model_dir) as weights:
        for chunk in chunks:
            load_weights(chunk, weights, base=base)
    return BaseModel(base, chunks)


def _build_chunk(
    base: BaseConfig, config: TransformerConfig, *, vp_stage: int | None, recompute: bool
) -> GPTModel:
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    chunk = GPTModel(
        config,
        block_spec(base, config, vp_stage=vp_stage, recompute=recompute),
        base.vocab_size,
        base.max_sequence_length,
        pre_process=first,
        post_process=last,
        parallel_output=False,
        # The last stage of a pipeline reads a tied output layer from the directory: it is frozen.
        share_embeddings_and_output_weights=base.tied_embeddings and first and last,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )
    if base.mla is None:
        chunk.rotary_pos_emb = Rotary(base)
    return chunk.to(device=device.compute_device()).requires_grad_(False)
