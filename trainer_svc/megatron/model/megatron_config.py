"""Megatron's configuration of a base model: every fused kernel off, nothing random."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from common.errors import ConfigError
from trainer_svc.megatron import device
from trainer_svc.megatron.model.base_config import BaseConfig, YarnScaling
from trainer_svc.megatron.model.rotary import attention_factor
from trainer_svc.megatron.settings import ParallelSettings


def megatron_config(
    base: BaseConfig, *, dtype: torch.dtype, parallel: ParallelSettings
) -> TransformerConfig:
    """Configuration of all ranks.

    Raises:
        ConfigError: a size of the model does not split over the ranks.
    """
    _check_split(base, parallel)
    kind = TransformerConfig if base.mla is None else MLATransformerConfig
    config: TransformerConfig = kind(
        **_shape(base),
        **_parallel(base, parallel),
        **_attention(base),
        **_experts(base),
        **_FIXED,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
    )
    # Rows differ in length from one micro-batch to the next. Set late, since the all-gather of
    # tokens refuses it: that needs one length among the expert-parallel ranks, at each step.
    config.variable_seq_lengths = True
    return config


_FIXED: dict[str, Any] = {
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
    "perform_initialization": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}


def _shape(base: BaseConfig) -> dict[str, Any]:
    return {
        "num_layers": base.num_layers,
        "hidden_size": base.hidden_size,
        "ffn_hidden_size": base.ffn_hidden_size,
        "num_attention_heads": base.heads.heads,
        "num_query_groups": base.heads.groups,
        "kv_channels": base.heads.head_dim,
        "layernorm_epsilon": base.norm_eps,
        "qk_layernorm": base.qk_norm,
        "add_qkv_bias": base.qkv_bias,
    }


def _parallel(base: BaseConfig, parallel: ParallelSettings) -> dict[str, Any]:
    stages, runs = parallel.pipeline_parallel_size, parallel.virtual_pipeline_size
    sequence_parallel = parallel.sequence_parallel
    if sequence_parallel is None:
        sequence_parallel = base.moe is not None
    return {
        "tensor_model_parallel_size": parallel.tensor_parallel_size,
        "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": runs if runs > 1 else None,
        "expert_model_parallel_size": parallel.expert_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
        "sequence_parallel": sequence_parallel and parallel.tensor_parallel_size > 1,
    }


def _attention(base: BaseConfig) -> dict[str, Any]:
    """With YaRN's factor on queries and keys in the softmax's scale, where all of a head rotates.

    Latent attention rotates a part of the head, and asks its rotary embedding for the factor.
    """
    mla, scaling = base.mla, base.rope_scaling
    if mla is None:
        scale = attention_factor(base) ** 2 / math.sqrt(base.heads.head_dim)
        return {"softmax_scale": scale}
    yarn = scaling if isinstance(scaling, YarnScaling) else None
    return {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.nope_head_dim,
        "qk_pos_emb_head_dim": mla.rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        # The type whose rotary embedding gives a factor too; the angles are our own.
        "rope_type": "yarn",
        "rotary_scaling_factor": yarn.factor if yarn else 1.0,
        "mscale_all_dim": yarn.mscale_all_dim if yarn else 0.0,
    }


def _experts(base: BaseConfig) -> dict[str, Any]:
    """No token is dropped and no loss added; the choice of experts is `Router`'s."""
    moe = base.moe
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_router_topk": moe.top_k,
        "moe_router_dtype": "fp32",
        "moe_router_score_function": moe.routing.score,
        "moe_router_enable_expert_bias": moe.routing.bias,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
        # Gloo has no all-to-all.
        "moe_token_dispatcher_type": "alltoall" if device.HAVE_CUDA else "allgather",
    }


def _check_split(base: BaseConfig, parallel: ParallelSettings) -> None:
    """Raises ConfigError where a size does not divide what it splits, by the key's name."""
    for setting, size, split in _splits(base, parallel):
        for key, value in split.items():
            if value % size:
                raise ConfigError(
                    f"{setting}: found {size}, which does not divide the model's "
                    f"{key} of {value}; choose a divisor"
                )
    if base.moe is None:
        for setting in ("expert_parallel_size", "expert_tensor_parallel_size"):
            if getattr(parallel, setting) > 1:
                raise ConfigError(
                    f"{setting}: found {getattr(parallel, setting)}, but the model has no experts; "
                    "leave it at 1"
                )
    elif parallel.tensor_parallel_size > 1 and parallel.sequence_parallel is False:
        raise ConfigError(
            "sequence_parallel: found false; a model with experts needs it over "
            f"{parallel.tensor_parallel_size} tensor-parallel ranks; leave it unset"
        )


def _splits(base: BaseConfig, parallel: ParallelSettings) -> list[tuple[str, int, dict[str, int]]]:
    """(setting, its value, what it must divide by Hugging Face's key)."""
    whole = {
        "num_attention_heads": base.heads.heads,
        "num_key_value_heads": base.heads.groups,
        "intermediate_size": base.ffn_hidden_size,
        "vocab_size": base.vocab_size,
    }
    if base.mla is not None:
        whole["q_lora_rank"] = base.mla.q_lora_rank or 0
        whole["kv_lora_rank + qk_rope_head_dim"] = base.mla.kv_lora_rank + base.mla.rope_head_dim
    stages = parallel.pipeline_parallel_size * parallel.virtual_pipeline_size
    splits = [
        ("tensor_parallel_size", parallel.tensor_parallel_size, whole),
        (
            "pipeline_parallel_size * virtual_pipeline_size",
            stages,
            {"num_hidden_layers": base.num_layers},
        ),
    ]
    if base.moe is not None:
        moe = base.moe
        whole["n_shared_experts * moe_intermediate_size"] = moe.shared_ffn_hidden_size
        experts = {"number of experts": moe.num_experts}
        ffn = {"moe_intermediate_size": moe.ffn_hidden_size}
        splits += [
            ("expert_parallel_size", parallel.expert_parallel_size, experts),
            ("expert_tensor_parallel_size", parallel.expert_tensor_parallel_size, ffn),
        ]
    return splits
