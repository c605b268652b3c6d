from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from tests.tiny_models import LLAMA3, YARN, save, save_config
from trainer_svc.megatron.model.architectures import read_base_config
from trainer_svc.megatron.model.base_config import Llama3Scaling, Routing
from trainer_svc.megatron.model.build import build_model


@pytest.mark.parametrize("rope", [LLAMA3, YARN, {"rope_type": "default", "rope_theta": 77.0}])
def test_rope_reads_alike_in_both_spellings(rope: dict[str, Any], tmp_path: Path) -> None:
    new = save_config("llama", tmp_path / "new", rope_parameters=rope)
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
    old = save_config(
        "llama",
        tmp_path / "old",
        rope_parameters=None,
        rope_theta=rope["rope_theta"],
        rope_scaling=scaling | {"type": rope["rope_type"]},
    )
    assert read_base_config(old) == read_base_config(new)
    assert read_base_config(new).rotary_base == rope["rope_theta"]


def test_llama3_scaling_reads_every_number(tmp_path: Path) -> None:
    base = read_base_config(save_config("llama3", tmp_path))
    assert base.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 32)


def test_a_missing_rope_base_is_the_family_s(tmp_path: Path) -> None:
    for name, base in (("llama", 1e4), ("mixtral", 1e6)):
        path = save_config(name, tmp_path / name, rope_parameters=None)
        assert read_base_config(path).rotary_base == base


def test_dense_layers_of_a_mixture(tmp_path: Path) -> None:
    def dense(name: str, **config: Any) -> list[int]:
        path = save_config(name, tmp_path, num_layers=6, **config)
        moe = read_base_config(path).moe
        assert moe is not None
        return [layer for layer in range(6) if not moe.is_sparse(layer)]

    assert dense("qwen3_moe", decoder_sparse_step=3) == [0, 1, 3, 4]
    assert dense("qwen3_moe", mlp_only_layers=[2, 5]) == [2, 5]
    assert dense("deepseek_v3", first_k_dense_replace=3) == [0, 1, 2]
    assert dense("mixtral") == []


def test_both_names_of_the_number_of_experts(tmp_path: Path) -> None:
    base = read_base_config(save_config("qwen3_moe", tmp_path))
    hub = save_config("qwen3_moe", tmp_path, num_local_experts=None, num_experts=4)
    assert read_base_config(hub) == base


def test_routing_of_each_family(tmp_path: Path) -> None:
    found = {}
    for name in ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v2_grouped", "deepseek_v3"):
        moe = read_base_config(save_config(name, tmp_path)).moe
        assert moe is not None
        found[name] = moe.routing
    grouped = Routing(scale=1.5, groups=2)
    assert found == {
        "qwen3_moe": Routing(normalize=True),
        "mixtral": Routing(normalize=True),
        "deepseek_v2": Routing(scale=1.5),
        "deepseek_v2_grouped": grouped,
        "deepseek_v3": dataclasses.replace(
            grouped, score="sigmoid", normalize=True, group_top=2, bias=True
        ),
    }


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "llama",
            {"architectures": ["GPT2LMHeadModel"]},
            "found GPT2LMHeadModel; implemented are Deepseek.*, LlamaForCausalLM, Mis.*Qwen3Moe",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "longrope"}},
            "rope_type is longrope; implemented: default, llama3, yarn",
        ),
        (
            "llama",
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling: type is linear",
        ),
        ("llama", {"rope_parameters": LLAMA3 | {"factor": None}}, "found no factor"),
        ("llama", {"rope_parameters": YARN | {"mrope_section": [8]}}, "mrope_section is .8.; im"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; implemented: 1.0"),
        ("llama", {"attention_bias": True}, "attention_bias is True; implemented: False"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is gelu; implemented: silu"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ("llama", {"rms_norm_eps": None}, "found no rms_norm_eps"),
        ("mistral", {"sliding_window": 4096}, "sliding_window is 4096; implemented: null"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, "sliding_window is 8"),
        ("qwen2", {"layer_types": ["sliding_attention"]}, "layer_types is sliding_attention"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is noaux_tc"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is softmax"),
    ],
)
def test_what_is_not_implemented_is_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = save_config(name, tmp_path, **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        read_base_config(path)
    assert "\n" not in str(caught.value)


def test_a_window_that_is_switched_off_is_none(tmp_path: Path) -> None:
    plain = read_base_config(save_config("qwen2", tmp_path))
    stated = save_config("qwen2", tmp_path, use_sliding_window=False, sliding_window=4096)
    assert read_base_config(stated) == plain


@pytest.mark.usefixtures("ranks")
def test_weights_that_do_not_fit_the_config_are_refused(tmp_path: Path) -> None:
    path = save("llama", tmp_path)
    for changes, message in (
        ({"num_layers": 3}, r"have no tensor model\.layers\.2\."),
        ({"intermediate_size": 96}, r"mlp\.gate_proj\.weight makes \(160, 64\) where config.json"),
    ):
        save_config("llama", path, **changes)
        with pytest.raises(ConfigError, match=message):
            build_model(path, dtype=torch.float32)


def test_a_missing_directory_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_base_config(tmp_path / "none")
    assert str(caught.value) == (
        f"model_dir: found no {tmp_path}/none/config.json; give a Hugging Face model directory"
    )
