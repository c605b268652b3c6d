"""Which linears and projections a user's names mean."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from common.errors import ConfigError
from trainer_svc.megatron.lora.plan import AdapterPlan, plan_adapter
from trainer_svc.megatron.lora.settings import LoraSettings
from trainer_svc.megatron.model.base_config import BaseConfig, Experts, Heads, LatentAttention

DENSE = BaseConfig(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=80,
    vocab_size=96,
    max_sequence_length=128,
    heads=Heads(4, 2, 16),
    norm_eps=1e-6,
    rotary_base=1e4,
    tied_embeddings=False,
)
SPARSE = dataclasses.replace(
    DENSE,
    moe=Experts(
        3, ffn_hidden_size=24, top_k=2, shared_ffn_hidden_size=48, dense_layers=frozenset({0})
    ),
)
LATENT = dataclasses.replace(DENSE, mla=LatentAttention(40, 32, 16, 8, 12))


def plan(base: BaseConfig, **settings: Any) -> AdapterPlan:
    return plan_adapter(base, LoraSettings.model_validate(settings))


def site_names(base: BaseConfig, **settings: Any) -> list[str]:
    return [site.name.removeprefix("decoder.layers.") for site in plan(base, **settings).sites]


def projections(base: BaseConfig, **settings: Any) -> list[str]:
    return [
        f"{site.layer}.{projection.canonical}"
        for site, _, pair in plan(base, **settings).pairs()
        for projection in pair.projections
    ]


def test_all_linear_means_every_linear_of_every_layer_but_the_router() -> None:
    """faults.md 10, verl#7413: the word was walked letter by letter."""
    assert site_names(DENSE) == [
        f"{layer}.{linear}"
        for layer in (0, 1)
        for linear in (
            "self_attention.linear_qkv",
            "self_attention.linear_proj",
            "mlp.linear_fc1",
            "mlp.linear_fc2",
        )
    ]
    assert site_names(SPARSE)[4:] == [
        "1.self_attention.linear_qkv",
        "1.self_attention.linear_proj",
        *(f"1.mlp.experts.local_experts.{expert}.linear_fc1" for expert in range(3)),
        *(f"1.mlp.experts.local_experts.{expert}.linear_fc2" for expert in range(3)),
        "1.mlp.shared_experts.linear_fc1",
        "1.mlp.shared_experts.linear_fc2",
    ]
    assert [name.rpartition(".")[2] for name in site_names(LATENT)[:5]] == [
        "linear_q_down_proj",
        "linear_q_up_proj",
        "linear_kv_down_proj",
        "linear_kv_up_proj",
        "linear_proj",
    ]


def test_one_adapter_for_all_experts_is_one_site() -> None:
    assert site_names(SPARSE, experts="shared", target_modules=["*.experts.*"]) == [
        "1.mlp.experts.local_experts.*.linear_fc1",
        "1.mlp.experts.local_experts.*.linear_fc2",
    ]


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("linear_fc2", ["0.mlp.linear_fc2", "1.mlp.linear_fc2"]),
        ("*.layers.0.*.linear_qkv", ["0.self_attention.linear_qkv"]),
        ("*fc?", [f"{n}.mlp.linear_fc{m}" for n in (0, 1) for m in (1, 2)]),
        ("decoder.layers.1.mlp.linear_fc1", ["1.mlp.linear_fc1"]),
    ],
)
def test_names_and_wildcards_pick_linears(target: str, found: list[str]) -> None:
    assert site_names(DENSE, target_modules=[target]) == found


def test_a_wildcard_picks_one_expert() -> None:
    assert site_names(SPARSE, target_modules=["*.local_experts.2.linear_fc1"]) == [
        "1.mlp.experts.local_experts.2.linear_fc1"
    ]


@pytest.mark.parametrize("target", ["router", "*.layers.1.mlp.router", "*router"])
def test_the_router_must_be_named(target: str) -> None:
    assert site_names(SPARSE, target_modules=[target]) == ["1.mlp.router"]
    assert "1.mlp.router" not in site_names(SPARSE, target_modules=["*"])


def test_canonical_names_pick_projections_and_fused_names_all_of_them() -> None:
    names = ["linear_q", "*.layers.1.*.linear_v", "*.layers.0.*.linear_fc1", "linear_proj"]
    assert projections(DENSE, type="canonical_lora", target_modules=names) == [
        "0.linear_q",
        "0.linear_proj",
        "0.linear_fc1_gate",
        "0.linear_fc1_up",
        "1.linear_q",
        "1.linear_v",
        "1.linear_proj",
    ]
    pairs = list(plan(DENSE, type="canonical_lora", target_modules=["linear_qkv"]).pairs())
    assert [(number, pair.out_features) for _, number, pair in pairs[:3]] == [
        (0, 64),
        (1, 32),
        (2, 32),
    ]


def test_exclusions_go_by_the_same_rules() -> None:
    assert site_names(DENSE, exclude_modules=["linear_fc1", "*.layers.0.*", "*proj"]) == [
        "1.self_attention.linear_qkv",
        "1.mlp.linear_fc2",
    ]
    kept = projections(
        DENSE,
        type="canonical_lora",
        target_modules=["linear_qkv"],
        exclude_modules=["linear_k", "*.1.*.linear_q"],
    )
    assert kept == ["0.linear_q", "0.linear_v", "1.linear_v"]


def test_the_first_pattern_that_matches_counts() -> None:
    found = plan(
        DENSE,
        target_modules=["linear_qkv", "linear_fc2"],
        rank_pattern={"*.layers.1.*": 2, "linear_qkv": 8},
        alpha_pattern={"linear_fc2": 3},
    )
    assert [(pair.rank, pair.alpha) for _, _, pair in found.pairs()] == [
        (8, 32),
        (16, 3),
        (2, 32),
        (2, 3),
    ]


def test_scale_is_linear_in_alpha_and_rslora_takes_the_root() -> None:
    def scale(**settings: Any) -> float:
        return plan(DENSE, **settings).sites[0].pairs[0].scale

    assert scale(rank=16, alpha=32) == 2.0
    assert scale(rank=16, alpha=64) == 4.0
    assert scale(rank=16, alpha=32, use_rslora=True) == 8.0
    assert scale(alpha=32, use_rslora=True, rank_pattern={"linear_qkv": 4}) == 16.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["linear_qvk"]}, 'did you mean "linear_qkv"'),
        ({"target_modules": ["linear_proj", "q_proj"]}, 'Hugging Face\'s name, use "linear_qkv"'),
        ({"target_modules": ["*.up_proj"]}, 'Hugging Face\'s name, use "linear_fc1"'),
        ({"target_modules": ["linear_k"]}, 'a part of "linear_qkv", .* type = "canonical_lora"'),
        (
            {"target_modules": ["q_proj"], "type": "canonical_lora"},
            'Hugging Face\'s name, use "linear_q"',
        ),
        (
            {"target_modules": ["*.layers.7.*.linear_proj"]},
            r'did you mean "decoder\.layers\.\d\.self_attention\.linear_proj"',
        ),
        ({"exclude_modules": ["linear_fc3"]}, 'exclude_modules: "linear_fc3" matches no module'),
        ({"rank_pattern": {"linear_qk": 4}}, 'rank_pattern: "linear_qk" .* "linear_qkv"'),
        (
            {"target_modules": ["linear_qkv"], "alpha_pattern": {"linear_fc1": 4}},
            r'alpha_pattern: "linear_fc1" .*\(modules: linear_qkv\)',
        ),
        ({"target_modules": ["router"]}, 'target_modules: "router" matches no module'),
        (
            {"target_modules": ["linear_qkv"], "exclude_modules": ["*.self_attention.*"]},
            "leaves none of target_modules",
        ),
    ],
)
def test_a_name_without_a_match_is_an_error_with_the_right_one(
    settings: dict[str, Any], message: str
) -> None:
    """faults.md 10, Megatron-Bridge create_peft."""
    with pytest.raises(ConfigError, match=message):
        plan(DENSE, **settings)


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"experts": "shared"}, "lora.experts"), ({"expert_layout": "flat"}, "lora.expert_layout")],
)
def test_a_setting_about_experts_that_are_none_is_refused(
    settings: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError, match=f"{field}: .* no expert of the model has an adapter"):
        plan(DENSE, **settings)
