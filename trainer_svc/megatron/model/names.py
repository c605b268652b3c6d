"""The table between Megatron's names and layouts and Hugging Face's: pure functions.

Megatron fuses what Hugging Face keeps apart. `linear_qkv` interleaves q, k and v by key-value
group; `linear_fc1` holds gate above up, on every tensor-parallel rank its own part of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

QKV = "self_attention.linear_qkv"
PROJ = "self_attention.linear_proj"
FC1 = "mlp.linear_fc1"
FC2 = "mlp.linear_fc2"

LINEARS: dict[str, tuple[str, ...]] = {
    QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    PROJ: ("self_attn.o_proj",),
    FC1: ("mlp.gate_proj", "mlp.up_proj"),
    FC2: ("mlp.down_proj",),
}
"""Every linear of a layer in walking order, and the Hugging Face projections it stands for."""

NORMS: dict[str, str] = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
}
"""Norms of a layer."""

GLOBALS: dict[str, str] = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
"""Parameters outside the layers."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention geometry of the whole model, before any tensor-parallel split."""

    heads: int
    groups: int
    head_dim: int


def module_name(layer: int, linear: str) -> str:
    """Full Megatron name of a linear; `layer` counts over the whole model."""
    return f"decoder.layers.{layer}.{linear}"


def split_layer(name: str) -> tuple[int, str] | None:
    """(layer, rest) of a name inside a layer, None of any other.

    >>> split_layer("decoder.layers.3.mlp.linear_fc2.weight")
    (3, 'mlp.linear_fc2.weight')
    """
    prefix = "decoder.layers."
    if not name.startswith(prefix):
        return None
    layer, _, rest = name.removeprefix(prefix).partition(".")
    return int(layer), rest


def hf_names(name: str) -> tuple[str, ...]:
    """Hugging Face tensors behind one Megatron parameter, in the order `fuse` takes them.

    Raises:
        KeyError: the table has no such parameter.
    """
    inside = split_layer(name)
    if inside is None:
        return (GLOBALS[name],)
    layer, rest = inside
    module, _, leaf = rest.rpartition(".")
    parts = LINEARS[module] if module in LINEARS else (NORMS[module],)
    return tuple(f"model.layers.{layer}.{part}.{leaf}" for part in parts)


def peft_name(layer: int, projection: str, matrix: str) -> str:
    """PEFT's name of an adapter tensor; `matrix` is `lora_A` or `lora_B`."""
    return f"base_model.model.model.layers.{layer}.{projection}.{matrix}.weight"


def fuse(linear: str, parts: Sequence[Tensor], *, heads: Heads) -> Tensor:
    """Rows of the fused linear (out, ...) from its projections' rows; fc1 is gate above up."""
    if linear != QKV:
        return torch.cat(list(parts))
    tail = parts[0].shape[1:]
    grouped = [part.reshape(heads.groups, -1, *tail) for part in parts]
    return torch.cat(grouped, dim=1).reshape(-1, *tail)


def split(linear: str, fused: Tensor, *, heads: Heads) -> tuple[Tensor, ...]:
    """Inverse of `fuse`: each projection's rows in Hugging Face's order, contiguous."""
    if linear != QKV:
        return fused.chunk(len(LINEARS[linear]))
    per_group = heads.heads // heads.groups
    tail = fused.shape[1:]
    grouped = fused.reshape(heads.groups, (per_group + 2) * heads.head_dim, *tail)
    sizes = [per_group * heads.head_dim, heads.head_dim, heads.head_dim]
    return tuple(part.reshape(-1, *tail) for part in torch.split(grouped, sizes, dim=1))


def shard_rows(linear: str, fused: Tensor, *, rank: int, size: int) -> Tensor:
    """Rows that tensor-parallel rank `rank` of `size` holds of a column-parallel linear."""
    return torch.cat([block.chunk(size)[rank] for block in fused.chunk(_blocks(linear))])


def join_rows(linear: str, shards: Sequence[Tensor]) -> Tensor:
    """Inverse of `shard_rows`, from all ranks' rows in rank order."""
    parts = [shard.chunk(_blocks(linear)) for shard in shards]
    return torch.cat([part[block] for block in range(_blocks(linear)) for part in parts])


def _blocks(linear: str) -> int:
    """Blocks of rows that are each split over the ranks: gate and up, else the whole."""
    return len(LINEARS[FC1]) if linear == FC1 else 1
