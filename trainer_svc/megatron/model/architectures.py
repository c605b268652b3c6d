"""From a Hugging Face `config.json` to Megatron's configuration, by a table of architectures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from common.errors import ConfigError
from trainer_svc.megatron.model.names import Heads


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a family of decoder models differs from Llama."""

    qkv_bias: bool = False
    qk_norm: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True),
    "Qwen3ForCausalLM": Architecture(qk_norm=True),
}

_MUST_BE = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "quantization_config": None,
}
"""Keys of `config.json` for which nothing but this value is implemented."""


@dataclass(frozen=True, slots=True)
class BaseConfig:
    """A base model's shape; sizes are those of the whole model."""

    architecture: Architecture
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    vocab_size: int
    max_sequence_length: int
    heads: Heads
    norm_eps: float
    rotary_base: float
    tied_embeddings: bool

    def to_megatron(self, *, dtype: torch.dtype, tensor_parallel_size: int) -> TransformerConfig:
        """Megatron's configuration with every fused kernel off.

        Raises:
            ConfigError: heads, groups, feed-forward or vocabulary do not split over the ranks.
        """
        self._check_split(tensor_parallel_size)
        return TransformerConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_attention_heads=self.heads.heads,
            num_query_groups=self.heads.groups,
            kv_channels=self.heads.head_dim,
            tensor_model_parallel_size=tensor_parallel_size,
            normalization="RMSNorm",
            layernorm_epsilon=self.norm_eps,
            qk_layernorm=self.architecture.qk_norm,
            add_bias_linear=False,
            add_qkv_bias=self.architecture.qkv_bias,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            use_cpu_initialization=True,
            perform_initialization=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            apply_rope_fusion=False,
            persist_layer_norm=False,
        )

    def _check_split(self, size: int) -> None:
        split = {
            "num_attention_heads": self.heads.heads,
            "num_key_value_heads": self.heads.groups,
            "intermediate_size": self.ffn_hidden_size,
            "vocab_size": self.vocab_size,
        }
        for name, value in split.items():
            if value % size:
                raise ConfigError(
                    f"tensor_parallel_size: found {size}, which does not divide the model's "
                    f"{name} of {value}; choose a divisor"
                )


def read_base_config(model_dir: Path) -> BaseConfig:
    """Read and check `config.json`.

    Raises:
        ConfigError: no such directory, an unknown architecture, or a feature that is not
            implemented.
    """
    path = model_dir / "config.json"
    if not path.is_file():
        raise ConfigError(f"model_dir: found no {path}; give a Hugging Face model directory")
    raw: dict[str, Any] = json.loads(path.read_text())
    architecture = _architecture(raw)
    for key, wanted in _MUST_BE.items():
        found = raw.get(key, wanted)
        if found != wanted and not _switched_off(raw, key):
            raise ConfigError(f"{path}: {key} is {found}; only {wanted} is implemented")
    heads = int(raw["num_attention_heads"])
    return BaseConfig(
        architecture=architecture,
        num_layers=raw["num_hidden_layers"],
        hidden_size=raw["hidden_size"],
        ffn_hidden_size=raw["intermediate_size"],
        vocab_size=raw["vocab_size"],
        max_sequence_length=raw["max_position_embeddings"],
        heads=Heads(
            heads=heads,
            groups=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        ),
        norm_eps=raw["rms_norm_eps"],
        rotary_base=_rotary_base(raw, path),
        tied_embeddings=raw.get("tie_word_embeddings", False),
    )


def _architecture(raw: dict[str, Any]) -> Architecture:
    (name,) = raw.get("architectures") or ("none",)
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"architectures: found {name}; implemented are {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]


def _switched_off(raw: dict[str, Any], key: str) -> bool:
    """Qwen2 states a sliding window and says elsewhere whether it is used."""
    return key == "sliding_window" and raw.get("use_sliding_window") is False


def _rotary_base(raw: dict[str, Any], path: Path) -> float:
    """`rope_theta`, on its own (transformers 4) or inside `rope_parameters` (transformers 5)."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"{path}: RoPE type is {kind}; only default is implemented")
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError(f"{path}: partial_rotary_factor is not 1; only 1 is implemented")
    return float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))
