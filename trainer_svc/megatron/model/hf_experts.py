"""Mixtures of experts as a `config.json` states them, by family. Imports no torch."""

from __future__ import annotations

from trainer_svc.megatron.model.base_config import Experts, Routing
from trainer_svc.megatron.model.hf_config import HfConfig


def qwen3_moe(config: HfConfig) -> Experts:
    """Experts in every `decoder_sparse_step`-th layer that `mlp_only_layers` leaves."""
    step = config.get("decoder_sparse_step", default=1)
    only_dense = config.get("mlp_only_layers", default=())
    return Experts(
        num_experts=config.need("num_experts", "num_local_experts"),
        ffn_hidden_size=config.need("moe_intermediate_size"),
        top_k=config.need("num_experts_per_tok"),
        routing=Routing(normalize=config.get("norm_topk_prob", default=False)),
        dense_layers=frozenset(
            layer
            for layer in range(config.need("num_hidden_layers"))
            if layer in only_dense or (layer + 1) % step
        ),
    )


def mixtral(config: HfConfig) -> Experts:
    """Experts in every layer, under names of their own."""
    config.allow("router_jitter_noise", 0.0)
    return Experts(
        num_experts=config.need("num_local_experts"),
        ffn_hidden_size=config.need("intermediate_size"),
        top_k=config.need("num_experts_per_tok"),
        routing=Routing(normalize=True),
        hf_block="block_sparse_moe",
        hf_expert=("w1", "w3", "w2"),
    )


def deepseek_v2(config: HfConfig) -> Experts:
    """Softmax scores; a group is as good as its best expert (arXiv 2405.04434, section 2.2)."""
    config.allow("scoring_func", "softmax")
    config.allow("norm_topk_prob", False)
    method = config.allow("topk_method", "greedy", "group_limited_greedy")
    grouped = method == "group_limited_greedy"
    return _deepseek(
        config,
        Routing(
            scale=config.get("routed_scaling_factor", default=1.0),
            groups=config.need("n_group") if grouped else 1,
            top_groups=config.need("topk_group") if grouped else 1,
        ),
    )


def deepseek_v3(config: HfConfig) -> Experts:
    """Sigmoid scores, chosen by score plus bias (arXiv 2412.19437, section 2.1.2)."""
    config.allow("scoring_func", "sigmoid")
    config.allow("topk_method", "noaux_tc")
    return _deepseek(
        config,
        Routing(
            score="sigmoid",
            normalize=config.get("norm_topk_prob", default=True),
            scale=config.need("routed_scaling_factor"),
            groups=config.need("n_group"),
            top_groups=config.need("topk_group"),
            group_top=2,
            bias=True,
        ),
    )


def _deepseek(config: HfConfig, routing: Routing) -> Experts:
    config.allow("moe_layer_freq", 1)
    ffn = config.need("moe_intermediate_size")
    return Experts(
        num_experts=config.need("n_routed_experts", "num_experts", "num_local_experts"),
        ffn_hidden_size=ffn,
        top_k=config.need("num_experts_per_tok"),
        routing=routing,
        shared_ffn_hidden_size=ffn * config.get("n_shared_experts", default=0),
        dense_layers=frozenset(range(config.get("first_k_dense_replace", default=0))),
    )
