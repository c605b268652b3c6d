"""From a Hugging Face `config.json` to a base model's shape, by a table of architectures.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from trainer_svc.megatron.model import hf_experts
from trainer_svc.megatron.model.base_config import BaseConfig, Experts, Heads, LatentAttention
from trainer_svc.megatron.model.hf_config import HfConfig
from trainer_svc.megatron.model.hf_rope import read_rope


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a family of decoder models differs from Llama."""

    qkv_bias: bool = False
    qk_norm: bool = False
    latent_attention: bool = False
    experts: Callable[[HfConfig], Experts] | None = None
    rotary_base: float = 10000.0
    """Where `config.json` has none."""


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True),
    "Qwen3ForCausalLM": Architecture(qk_norm=True),
    "Qwen3MoeForCausalLM": Architecture(qk_norm=True, experts=hf_experts.qwen3_moe),
    "MixtralForCausalLM": Architecture(experts=hf_experts.mixtral, rotary_base=1e6),
    "DeepseekV2ForCausalLM": Architecture(latent_attention=True, experts=hf_experts.deepseek_v2),
    "DeepseekV3ForCausalLM": Architecture(latent_attention=True, experts=hf_experts.deepseek_v3),
}

_IMPLEMENTED = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "mlp_bias": (False,),
    "rope_interleave": (True,),
    "quantization_config": (),
}
"""What these keys of `config.json` may say."""


def read_base_config(model_dir: Path) -> BaseConfig:
    """Read and check `config.json`.

    Raises:
        ConfigError: no such directory, an unknown architecture, or a feature that is not
            implemented.
    """
    config = HfConfig.read(model_dir)
    architecture = _architecture(config)
    for name, implemented in _IMPLEMENTED.items():
        config.allow(name, *implemented)
    _refuse_windows(config)
    rotary_base, rope_scaling = read_rope(config, default_base=architecture.rotary_base)
    mla = _latent_attention(config) if architecture.latent_attention else None
    return BaseConfig(
        num_layers=config.need("num_hidden_layers"),
        hidden_size=config.need("hidden_size"),
        ffn_hidden_size=config.need("intermediate_size"),
        vocab_size=config.need("vocab_size"),
        max_sequence_length=config.need("max_position_embeddings"),
        heads=_heads(config, mla),
        norm_eps=config.need("rms_norm_eps"),
        rotary_base=rotary_base,
        rope_scaling=rope_scaling,
        tied_embeddings=config.get("tie_word_embeddings", default=False),
        qkv_bias=architecture.qkv_bias,
        qk_norm=architecture.qk_norm,
        mla=mla,
        moe=architecture.experts(config) if architecture.experts else None,
    )


def _architecture(config: HfConfig) -> Architecture:
    (name,) = config.get("architectures") or ("none",)
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"architectures: found {name}; implemented are {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]


def _refuse_windows(config: HfConfig) -> None:
    """Qwen states a sliding window and says elsewhere whether it is used."""
    if config.get("use_sliding_window") is not False:
        config.allow("sliding_window")
    for kind in config.get("layer_types", default=()):
        HfConfig(config.source, {"layer_types": kind}).allow("layer_types", "full_attention")


def _heads(config: HfConfig, mla: LatentAttention | None) -> Heads:
    heads = int(config.need("num_attention_heads"))
    if mla is not None:
        return Heads(heads=heads, groups=heads, head_dim=mla.nope_head_dim + mla.rope_head_dim)
    return Heads(
        heads=heads,
        groups=config.get("num_key_value_heads", default=heads),
        head_dim=config.get("head_dim", default=config.need("hidden_size") // heads),
    )


def _latent_attention(config: HfConfig) -> LatentAttention:
    if "q_lora_rank" not in config.keys:
        config.need("q_lora_rank")  # Null means none; transformers takes 1536 for a missing one.
    return LatentAttention(
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=config.need("kv_lora_rank"),
        nope_head_dim=config.need("qk_nope_head_dim"),
        rope_head_dim=config.need("qk_rope_head_dim"),
        v_head_dim=config.need("v_head_dim"),
    )
