"""Between Megatron's parameters and Hugging Face's tensors: pure functions.

Names of Megatron's count layers and experts over the whole model here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer_svc.megatron.model.base_config import BaseConfig, Heads
from trainer_svc.megatron.model.linears import Fusion, Linear, Split, layer_linears
from trainer_svc.megatron.model.shard import Shard

_EMBEDDING = "model.embed_tokens.weight"
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


@dataclass(frozen=True, slots=True)
class Stored:
    """What a Megatron parameter is made of: whole Hugging Face tensors, in `fuse`'s order."""

    names: tuple[str, ...]
    split: Split = Split.NONE
    fusion: Fusion = Fusion.NONE
    is_expert: bool = False
    """Whether `split` is over the expert-tensor-parallel ranks."""

    @property
    def shard(self) -> Shard:
        """How the whole, fused parameter lies over the ranks that share it."""
        dims = {Split.ROWS: 0, Split.COLUMNS: 1, Split.NONE: None}
        return Shard(dims[self.split], blocks=_blocks(self.fusion))


def stored(base: BaseConfig, name: str) -> Stored:
    """Where a directory of Hugging Face's keeps a parameter, or an expert bias.

    Raises:
        KeyError: the model has no such parameter.
    """
    inside = split_layer(name)
    if inside is None:
        return _outside_layers(base)[name]
    layer, rest = inside
    module, _, leaf = rest.rpartition(".")
    prefix = f"model.layers.{layer}."
    if leaf == "expert_bias" and base.moe is not None:
        return Stored((f"{prefix}{base.moe.hf_block}.gate.e_score_correction_bias",))
    norms = _norms(base)
    if module in norms:
        return Stored((f"{prefix}{norms[module]}.{leaf}",))
    expert = _EXPERT.search(module)
    linear = _linears(base, layer)[_EXPERT.sub("{expert}", module)]
    number = expert.group() if expert else ""
    return Stored(
        tuple(f"{prefix}{p.name.format(expert=number)}.{leaf}" for p in linear.projections),
        split=linear.split,
        fusion=linear.fusion,
        is_expert=linear.is_expert,
    )


def _outside_layers(base: BaseConfig) -> dict[str, Stored]:
    output = _EMBEDDING if base.tied_embeddings else "lm_head.weight"
    return {
        "embedding.word_embeddings.weight": Stored((_EMBEDDING,), Split.ROWS),
        "decoder.final_layernorm.weight": Stored(("model.norm.weight",)),
        "output_layer.weight": Stored((output,), Split.ROWS),
    }


def _norms(base: BaseConfig) -> dict[str, str]:
    query, key = ("q_norm", "k_norm") if base.mla is None else ("q_a_layernorm", "")
    return {
        "input_layernorm": "input_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "self_attention.q_layernorm": f"self_attn.{query}",
        "self_attention.k_layernorm": f"self_attn.{key}",
        "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    }


def _linears(base: BaseConfig, layer: int) -> dict[str, Linear]:
    return {linear.name: linear for linear in layer_linears(base, layer)}


def module_name(layer: int, linear: str) -> str:
    """Full Megatron name of a module inside a layer."""
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


def global_name(name: str, *, first_layer: int, first_expert: int) -> str:
    """A name of a rank's own model with its layers and experts counted over the whole model.

    >>> name = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"
    >>> global_name(name, first_layer=2, first_expert=4)
    'decoder.layers.2.mlp.experts.local_experts.5.linear_fc1.weight'
    """
    inside = split_layer(name)
    if inside is None:
        return name
    layer, rest = inside
    rest = _EXPERT.sub(lambda match: str(int(match.group()) + first_expert), rest)
    return module_name(layer + first_layer, rest)


def fuse(fusion: Fusion, parts: Sequence[Tensor], *, heads: Heads) -> Tensor:
    """Rows of the fused linear (out, ...) from its projections' rows.

    `linear_qkv` interleaves q, k and v by key-value group; `linear_fc1` is gate above up.
    """
    if fusion is not Fusion.QKV:
        return torch.cat(list(parts))
    tail = parts[0].shape[1:]
    grouped = [part.reshape(heads.groups, -1, *tail) for part in parts]
    return torch.cat(grouped, dim=1).reshape(-1, *tail)


def split(fusion: Fusion, fused: Tensor, *, heads: Heads) -> tuple[Tensor, ...]:
    """Inverse of `fuse`: each projection's rows in Hugging Face's order, contiguous."""
    if fusion is not Fusion.QKV:
        return fused.chunk(_blocks(fusion))
    per_group = heads.heads // heads.groups
    tail = fused.shape[1:]
    grouped = fused.reshape(heads.groups, (per_group + 2) * heads.head_dim, *tail)
    sizes = [per_group * heads.head_dim, heads.head_dim, heads.head_dim]
    return tuple(part.reshape(-1, *tail) for part in torch.split(grouped, sizes, dim=1))


def _blocks(fusion: Fusion) -> int:
    """Blocks of rows that are each split over the ranks: gate and up, else the whole."""
    return 2 if fusion is Fusion.GATE_UP else 1
