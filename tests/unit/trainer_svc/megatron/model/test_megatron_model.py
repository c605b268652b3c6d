from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from common.errors import ConfigError
from trainer_svc.megatron.model.build import build_model, hidden_states, output_logits

pytestmark = pytest.mark.usefixtures("ranks")

SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "initializer_range": 0.1,
    "max_position_embeddings": 128,
}


@torch.no_grad()
def megatron_logits(path: Path, tokens: Tensor) -> Tensor:
    model = build_model(path, dtype=torch.float32)
    return output_logits(model, hidden_states(model, tokens)).transpose(0, 1)


@torch.no_grad()
def hugging_face_logits(path: Path, tokens: Tensor) -> Tensor:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    logits: Tensor = model(tokens).logits
    return logits


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 96, (3, 17), generator=torch.Generator().manual_seed(1))


def edited(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of a model directory with changed config.json; None drops a key."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (target / "config.json").write_text(json.dumps(kept))
    return target


def test_llama_logits_are_those_of_hugging_face(tiny_dir: Path, tokens: Tensor) -> None:
    expected = hugging_face_logits(tiny_dir, tokens)
    assert expected.abs().max() > 1
    torch.testing.assert_close(megatron_logits(tiny_dir, tokens), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Qwen2ForCausalLM, Qwen2Config(**SHAPE, tie_word_embeddings=True)),
        (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16)),
    ],
)
def test_qwen_logits_are_those_of_hugging_face(
    tmp_path: Path, tokens: Tensor, kind: type[PreTrainedModel], config: Any
) -> None:
    torch.manual_seed(3)
    model = kind(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    model.save_pretrained(tmp_path)
    expected = hugging_face_logits(tmp_path, tokens)
    torch.testing.assert_close(megatron_logits(tmp_path, tokens), expected, atol=1e-5, rtol=0)


def test_rope_theta_counts_in_both_places(tiny_dir: Path, tmp_path: Path, tokens: Tensor) -> None:
    inside = {"rope_type": "default", "rope_theta": 77.0}
    new = edited(tiny_dir, tmp_path / "new", rope_parameters=inside)
    old = edited(tiny_dir, tmp_path / "old", rope_parameters=None, rope_theta=77.0)
    logits = megatron_logits(new, tokens)
    assert torch.equal(logits, megatron_logits(old, tokens))
    assert not torch.equal(logits, megatron_logits(tiny_dir, tokens))


def test_a_padded_row_has_the_logits_of_a_row_alone(tiny_dir: Path, tokens: Tensor) -> None:
    alone = megatron_logits(tiny_dir, tokens[:1, :9])
    padded = tokens.clone()
    padded[0, 9:] = 0
    torch.testing.assert_close(megatron_logits(tiny_dir, padded)[:1, :9], alone)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "found GPT2LMHeadModel; implemented are Llama"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "RoPE type is llama3"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"num_hidden_layers": 3}, "have no tensor model.layers.2."),
    ],
)
def test_what_is_not_implemented_is_refused(
    tiny_dir: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = edited(tiny_dir, tmp_path / "model", **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        build_model(path, dtype=torch.float32)
    assert "\n" not in str(caught.value)


def test_a_missing_directory_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(tmp_path / "none", dtype=torch.float32)
    assert str(caught.value) == (
        f"model_dir: found no {tmp_path}/none/config.json; give a Hugging Face model directory"
    )
