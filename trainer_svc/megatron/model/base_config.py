"""A base model's shape, as numbers; sizes are those of the whole model. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention geometry of the whole model, before any tensor-parallel split."""

    heads: int
    groups: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (arXiv 2405.04434); ranks and head dimensions."""

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Rotary frequencies stretched as Llama 3.1 does it (arXiv 2407.21783, section 3.4)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071)."""

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    """Whether the ramp between the two betas begins and ends at whole dimensions."""

    attention_factor: float
    """Factor on the rotated parts of queries and keys."""

    mscale_all_dim: float
    """DeepSeek's factor on the logarithm in the softmax's scale; 0 leaves that as it is."""

    @property
    def softmax_mscale(self) -> float:
        """Square root of what DeepSeek multiplies the softmax's scale by."""
        return yarn_mscale(self.factor, self.mscale_all_dim)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 mscale ln(factor) + 1 (arXiv 2309.00071, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router weighs the experts of a token."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    """Over all experts, or of each on its own."""

    normalize: bool = False
    """Whether the chosen scores are divided by their sum."""

    scale: float = 1.0
    """Factor on the weights."""

    groups: int = 1
    """Groups of experts, of which the best `top_groups` can be chosen from."""

    top_groups: int = 1

    group_top: int = 1
    """Number of best scores that add up to a group's."""

    bias: bool = False
    """Whether a bias per expert is added to the scores for the choice, not for the weights."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts."""

    num_experts: int
    ffn_hidden_size: int
    """Of one expert."""

    top_k: int
    routing: Routing = Routing()
    shared_ffn_hidden_size: int = 0
    """Of the experts that every token passes; 0 for none."""

    dense_layers: frozenset[int] = frozenset()
    """Layers with an ordinary MLP instead."""

    hf_block: str = "mlp"
    """Hugging Face's name of the block inside a layer."""

    hf_expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Hugging Face's names of an expert's gate, up and down projections."""

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer has experts."""
        return layer not in self.dense_layers


@dataclass(frozen=True, slots=True)
class BaseConfig:
    """A base model's shape."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    vocab_size: int
    max_sequence_length: int
    heads: Heads
    norm_eps: float
    rotary_base: float
    tied_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_scaling: Llama3Scaling | YarnScaling | None = None
    mla: LatentAttention | None = None
    moe: Experts | None = None

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.heads.head_dim if self.mla is None else self.mla.rope_head_dim
