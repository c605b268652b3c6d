"""Every linear of a layer that can take an adapter: Megatron's fused and split modules, and the
Hugging Face projections they stand for. Imports no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trainer_svc.megatron.model.base_config import BaseConfig


class Split(enum.Enum):
    """What tensor-parallel ranks each hold of a weight (out_features, in_features)."""

    ROWS = "rows"
    """Megatron's column-parallel linear: some of the output rows."""

    COLUMNS = "columns"
    """Megatron's row-parallel linear: some of the input columns."""

    NONE = "none"
    """All of it."""


class Fusion(enum.Enum):
    """How the rows of several projections make up those of one Megatron linear."""

    NONE = "none"
    """One projection."""

    QKV = "qkv"
    """By key-value group: the group's query heads, its key head, its value head."""

    GATE_UP = "gate_up"
    """Gate above up, on every tensor-parallel rank its own part of both."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A Hugging Face linear: its name inside a layer, and the name of its own adapter.

    An expert's name holds `{expert}`. `canonical` is what `canonical_lora` calls it in
    `target_modules`, beside its fused linear's name.
    """

    name: str
    canonical: str
    out_features: int

    @property
    def own_name(self) -> str:
        """The last part, as PEFT's `target_modules` has it.

        >>> Projection("self_attn.q_proj", "linear_q", 64).own_name
        'q_proj'
        """
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Linear:
    """A Megatron linear of a layer; sizes are those of the whole model.

    An expert's name holds `{expert}`: Megatron numbers the experts of a rank from 0.
    """

    name: str
    projections: tuple[Projection, ...]
    in_features: int
    split: Split
    fusion: Fusion = Fusion.NONE

    @property
    def is_expert(self) -> bool:
        return "{expert}" in self.name

    @property
    def own_name(self) -> str:
        """The last part of the name, `linear_qkv`; of a router, `router`."""
        return self.name.rpartition(".")[2]

    @property
    def out_features(self) -> int:
        return sum(projection.out_features for projection in self.projections)


def layer_linears(base: BaseConfig, layer: int) -> tuple[Linear, ...]:
    """The linears of one layer, in walking order; `layer` counts over the whole model."""
    attention = _attention(base) if base.mla is None else _latent_attention(base)
    if base.moe is None or not base.moe.is_sparse(layer):
        return attention + _gated_mlp(base, "mlp", "mlp", ffn=base.ffn_hidden_size)
    return attention + _experts(base)


def _attention(base: BaseConfig) -> tuple[Linear, ...]:
    heads = base.heads
    query, key = heads.heads * heads.head_dim, heads.groups * heads.head_dim
    return (
        Linear(
            "self_attention.linear_qkv",
            (
                Projection("self_attn.q_proj", "linear_q", query),
                Projection("self_attn.k_proj", "linear_k", key),
                Projection("self_attn.v_proj", "linear_v", key),
            ),
            base.hidden_size,
            Split.ROWS,
            Fusion.QKV,
        ),
        _output_projection(base, in_features=query),
    )


def _output_projection(base: BaseConfig, *, in_features: int) -> Linear:
    output = Projection("self_attn.o_proj", "linear_proj", base.hidden_size)
    return Linear("self_attention.linear_proj", (output,), in_features, Split.COLUMNS)


def _latent_attention(base: BaseConfig) -> tuple[Linear, ...]:
    """DeepSeek's multi-head latent attention (arXiv 2405.04434, section 2.1)."""
    mla = base.mla
    assert mla is not None
    heads = base.heads.heads
    query = heads * (mla.nope_head_dim + mla.rope_head_dim)
    latent = mla.kv_lora_rank + mla.rope_head_dim
    up = heads * (mla.nope_head_dim + mla.v_head_dim)
    hidden, rank = base.hidden_size, mla.q_lora_rank

    def rows(own: str, projection: str, *, out: int, into: int) -> Linear:
        part = Projection(f"self_attn.{projection}", own, out)
        return Linear(f"self_attention.{own}", (part,), into, Split.ROWS)

    if rank is None:
        queries = [rows("linear_q_proj", "q_proj", out=query, into=hidden)]
    else:
        queries = [
            rows("linear_q_down_proj", "q_a_proj", out=rank, into=hidden),
            rows("linear_q_up_proj", "q_b_proj", out=query, into=rank),
        ]
    return (
        *queries,
        rows("linear_kv_down_proj", "kv_a_proj_with_mqa", out=latent, into=hidden),
        rows("linear_kv_up_proj", "kv_b_proj", out=up, into=mla.kv_lora_rank),
        _output_projection(base, in_features=heads * mla.v_head_dim),
    )


def _experts(base: BaseConfig) -> tuple[Linear, ...]:
    moe = base.moe
    assert moe is not None
    router = Projection(f"{moe.hf_block}.gate", "router", moe.num_experts)
    linears = [
        Linear("mlp.router", (router,), base.hidden_size, Split.NONE),
        *_gated_mlp(
            base,
            "mlp.experts.local_experts.{expert}",
            f"{moe.hf_block}.experts.{{expert}}",
            ffn=moe.ffn_hidden_size,
            names=moe.hf_expert,
        ),
    ]
    if moe.shared_ffn_hidden_size:
        linears += _gated_mlp(
            base, "mlp.shared_experts", "mlp.shared_experts", ffn=moe.shared_ffn_hidden_size
        )
    return tuple(linears)


def _gated_mlp(
    base: BaseConfig,
    module: str,
    block: str,
    *,
    ffn: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Linear, ...]:
    """fc1 and fc2 of a gated MLP; `names` are what Hugging Face calls gate, up and down."""
    gate, up, down = (f"{block}.{name}" for name in names)
    return (
        Linear(
            f"{module}.linear_fc1",
            (
                Projection(gate, "linear_fc1_gate", ffn),
                Projection(up, "linear_fc1_up", ffn),
            ),
            base.hidden_size,
            Split.ROWS,
            Fusion.GATE_UP,
        ),
        Linear(
            f"{module}.linear_fc2",
            (Projection(down, "linear_fc2", base.hidden_size),),
            ffn,
            Split.COLUMNS,
        ),
    )
