"""A tiny random Hugging Face model of every architecture that the trainer runs, by short name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 96
ORIGINAL_POSITIONS = 32
"""Positions a model with scaled RoPE was trained on; rows beyond it show the scaling."""

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL_POSITIONS,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL_POSITIONS,
}
DEEPSEEK_YARN = YARN | {"beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 1.0}

DENSE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "initializer_range": 0.1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK: dict[str, Any] = DENSE | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
QWEN3_MOE: dict[str, Any] = DENSE | {
    "head_dim": 24,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}

ARCHITECTURES: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": lambda **more: LlamaConfig(**DENSE | {"head_dim": 32} | more),
    "llama_tied": lambda **more: LlamaConfig(**DENSE | {"tie_word_embeddings": True} | more),
    "llama3": lambda **more: LlamaConfig(**DENSE | {"rope_parameters": dict(LLAMA3)} | more),
    "llama_yarn": lambda **more: LlamaConfig(**DENSE | {"rope_parameters": dict(YARN)} | more),
    "mistral": lambda **more: MistralConfig(**DENSE | {"sliding_window": None} | more),
    "qwen2": lambda **more: Qwen2Config(**DENSE | {"tie_word_embeddings": True} | more),
    "qwen3": lambda **more: Qwen3Config(**DENSE | {"head_dim": 24} | more),
    "qwen3_yarn": lambda **more: Qwen3Config(
        **DENSE | {"head_dim": 24, "rope_parameters": YARN | {"attention_factor": 1.3}} | more
    ),
    "qwen3_moe": lambda **more: Qwen3MoeConfig(**QWEN3_MOE | {"norm_topk_prob": True} | more),
    "qwen3_moe_unnormed": lambda **more: Qwen3MoeConfig(
        **QWEN3_MOE | {"norm_topk_prob": False, "mlp_only_layers": [1]} | more
    ),
    "mixtral": lambda **more: MixtralConfig(
        **DENSE | {"num_local_experts": 4, "num_experts_per_tok": 2} | more
    ),
    "deepseek_v2": lambda **more: DeepseekV2Config(**DEEPSEEK | {"q_lora_rank": None} | more),
    "deepseek_v2_grouped": lambda **more: DeepseekV2Config(
        **DEEPSEEK
        | {
            "q_lora_rank": 40,
            "topk_method": "group_limited_greedy",
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": dict(DEEPSEEK_YARN),
        }
        | more
    ),
    "deepseek_v3": lambda **more: DeepseekV3Config(
        **DEEPSEEK
        | {
            "q_lora_rank": 40,
            "n_group": 2,
            "topk_group": 1,
            "num_mtp_layers": 0,
            "rope_parameters": dict(DEEPSEEK_YARN),
        }
        | more
    ),
}
"""Configurations: hidden size 64, 4 heads, all sizes even, so that two ranks split each of them."""


def save_config(name: str, path: Path, *, num_layers: int = 2, **config: Any) -> Path:
    """Save the `config.json` of a model of `ARCHITECTURES` alone; `config` overrides its keys, as
    they are, also with what transformers would not write."""
    keys = ARCHITECTURES[name](num_hidden_layers=num_layers).to_dict()
    kind = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[keys["model_type"]]
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(keys | {"architectures": [kind]} | config))
    return path


def save(name: str, path: Path, *, num_layers: int = 2, seed: int = 7, **config: Any) -> Path:
    """Save a model of `ARCHITECTURES` to `path` in float32, as `save_pretrained` writes it.

    Norms, biases and correction biases are random too, so that one in the wrong place shows.
    `config` overrides keys of its `config.json`.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            ARCHITECTURES[name](num_hidden_layers=num_layers, **config)
        )
        for key, tensor in model.state_dict().items():
            if "norm" in key or key.endswith("bias"):
                tensor.add_(torch.randn_like(tensor), alpha=0.3)
    model.save_pretrained(path)
    return path


def load(path: Path) -> PreTrainedModel:
    """Hugging Face's model of a directory, in float32 and without dropout."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.eval()
    return model
