"""Which module every part of a layer is: the one place that chooses."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    HAVE_TE,
    TEColumnParallelLinear,
    TERowParallelLinear,
)
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from trainer_svc.megatron import device
from trainer_svc.megatron.model.attention import LayoutAttention
from trainer_svc.megatron.model.base_config import BaseConfig, Experts
from trainer_svc.megatron.model.latent_attention import LatentAttention
from trainer_svc.megatron.model.recompute import RecomputedLayer
from trainer_svc.megatron.model.rotary import LatentRotary
from trainer_svc.megatron.model.router import Router

_USE_TE = HAVE_TE and device.HAVE_CUDA
# Those without a norm inside, so that an adapter wraps one and the other alike.
COLUMN_LINEAR = TEColumnParallelLinear if _USE_TE else ColumnParallelLinear
ROW_LINEAR = TERowParallelLinear if _USE_TE else RowParallelLinear


class RMSNorm(torch.nn.RMSNorm):
    """Torch's, which works on a part of the sequence like on the whole."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


class LatentNorm(RMSNorm):
    """Of latent attention's compressed vectors: DeepSeek's models ignore `rms_norm_eps` there."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(config, hidden_size, eps=1e-6)


def block_spec(
    base: BaseConfig, config: TransformerConfig, *, vp_stage: int | None, recompute: bool
) -> TransformerBlockSubmodules:
    """The layers of this rank's pipeline stage, or of one of its runs of layers.

    With `recompute` they keep their inputs alone for the backward pass.
    """
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    attention = _attention(base) if base.mla is None else _latent_attention(base)
    layers = [
        ModuleSpec(
            module=RecomputedLayer if recompute else TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=RMSNorm,
                self_attention=attention,
                self_attn_bda=get_bias_dropout_add,
                pre_mlp_layernorm=RMSNorm,
                mlp=_mlp(base, layer),
                mlp_bda=get_bias_dropout_add,
            ),
        )
        for layer in range(first, first + count)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _attention(base: BaseConfig) -> ModuleSpec:
    norm = RMSNorm if base.qk_norm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=COLUMN_LINEAR,
            core_attention=LayoutAttention,
            linear_proj=ROW_LINEAR,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )


def _latent_attention(base: BaseConfig) -> ModuleSpec:
    return ModuleSpec(
        module=LatentAttention,
        # One for all layers: each sets the layout before it asks for the angles.
        params={"attn_mask_type": AttnMaskType.causal, "rotary": LatentRotary(base)},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=COLUMN_LINEAR,
            linear_q_down_proj=COLUMN_LINEAR,
            linear_q_up_proj=COLUMN_LINEAR,
            linear_kv_down_proj=COLUMN_LINEAR,
            linear_kv_up_proj=COLUMN_LINEAR,
            core_attention=LayoutAttention,
            linear_proj=ROW_LINEAR,
            q_layernorm=LatentNorm,
            kv_layernorm=LatentNorm,
        ),
    )


def _mlp(base: BaseConfig, layer: int) -> ModuleSpec:
    linears = MLPSubmodules(linear_fc1=COLUMN_LINEAR, linear_fc2=ROW_LINEAR)
    if base.moe is None or not base.moe.is_sparse(layer):
        return ModuleSpec(module=MLP, submodules=linears)
    return ModuleSpec(module=MoELayer, submodules=_experts(base.moe, linears))


def _experts(moe: Experts, linears: MLPSubmodules) -> Any:
    return MoESubmodules(
        router=partial(Router, routing=moe.routing),
        experts=ModuleSpec(module=SequentialMLP, submodules=linears),
        shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=linears),
    )
