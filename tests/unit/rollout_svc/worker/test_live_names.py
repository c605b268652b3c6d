"""From Hugging Face's names to vLLM's live parameters."""

from __future__ import annotations

import pytest

from rollout_svc.worker.live_names import live_name

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
PLAIN = {
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.qkv_proj.weight",
    "model.layers.0.self_attn.qkv_proj.bias",
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.mlp.experts.w13_weight",
    "model.layers.0.mlp.experts.w2_weight",
    "model.layers.0.input_layernorm.weight",
}
WRAPPED = {
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.qkv_proj.base_layer.weight",
    "model.layers.0.self_attn.qkv_proj.base_layer.bias",
    "model.layers.0.self_attn.o_proj.base_layer.weight",
    "model.layers.0.mlp.gate.base_layer.weight",
    "model.layers.0.mlp.experts.base_layer.w13_weight",
    "model.layers.0.mlp.experts.base_layer.routed_experts.w2_weight",
    "model.layers.0.input_layernorm.weight",
    "lm_head.base_layer.weight",
}
LAYER = "model.layers.0."


@pytest.mark.parametrize(
    ("name", "live", "expected"),
    [
        ("model.embed_tokens.weight", PLAIN, "model.embed_tokens.weight"),
        (f"{LAYER}self_attn.k_proj.weight", PLAIN, f"{LAYER}self_attn.qkv_proj.weight"),
        (f"{LAYER}mlp.gate.weight", PLAIN, f"{LAYER}mlp.gate.weight"),
        (f"{LAYER}mlp.experts.7.up_proj.weight", PLAIN, f"{LAYER}mlp.experts.w13_weight"),
        (f"{LAYER}mlp.experts.7.w2.weight", PLAIN, f"{LAYER}mlp.experts.w2_weight"),
        (f"{LAYER}self_attn.q_proj.bias", WRAPPED, f"{LAYER}self_attn.qkv_proj.base_layer.bias"),
        (f"{LAYER}self_attn.o_proj.weight", WRAPPED, f"{LAYER}self_attn.o_proj.base_layer.weight"),
        (f"{LAYER}mlp.gate.weight", WRAPPED, f"{LAYER}mlp.gate.base_layer.weight"),
        (
            f"{LAYER}mlp.experts.0.gate_proj.weight",
            WRAPPED,
            f"{LAYER}mlp.experts.base_layer.w13_weight",
        ),
        (
            f"{LAYER}mlp.experts.3.down_proj.weight",
            WRAPPED,
            f"{LAYER}mlp.experts.base_layer.routed_experts.w2_weight",
        ),
        (f"{LAYER}input_layernorm.weight", WRAPPED, f"{LAYER}input_layernorm.weight"),
        ("lm_head.weight", WRAPPED, "lm_head.base_layer.weight"),
        ("model.layers.1.self_attn.k_proj.weight", WRAPPED, None),
        (f"{LAYER}mlp.experts.0.gate_proj.scale", WRAPPED, None),
        ("lm_head.weight", PLAIN, None),
    ],
)
def test_each_name_is_looked_up_among_the_live_ones(
    name: str, live: set[str], expected: str | None
) -> None:
    """faults.md 11, vllm#31104: wrapped or not, packed or not, experts too, name by name."""
    assert live_name(name, live, PACKED) == expected
