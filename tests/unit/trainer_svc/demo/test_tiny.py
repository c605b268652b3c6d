from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer_svc.demo import tiny


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.prepare(tmp_path_factory.mktemp("models") / "tiny")


def test_config(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float32",
        "head_dim": 32,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "vocab_size": 320,
    }
    assert {key: config[key] for key in expected} == expected


def test_weights_follow_from_the_seed(model_dir: Path, tmp_path: Path) -> None:
    weights = (model_dir / "model.safetensors").read_bytes()
    again, other = tiny.prepare(tmp_path / "a"), tiny.prepare(tmp_path / "b", seed=1)
    assert (again / "model.safetensors").read_bytes() == weights
    assert (other / "model.safetensors").read_bytes() != weights


def test_a_finished_model_is_left_alone(model_dir: Path) -> None:
    before = (model_dir / "model.safetensors").stat().st_mtime_ns
    assert tiny.prepare(model_dir, seed=5) == model_dir
    assert (model_dir / "model.safetensors").stat().st_mtime_ns == before


def test_a_token_is_a_byte(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    text = "Zoë: 1 < 2\n"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.decode([97, 0xC3, 258, 319, 98], skip_special_tokens=True) == "a\ufffdb"
    assert len(tokenizer) == tiny.VOCAB_SIZE


def test_chat_template(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "ab"}], add_generation_prompt=True, return_dict=False
    )
    assert ids == [260, 97, 98, tokenizer.eos_token_id, 261]


def test_fp32_model_computes(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = tiny.prepare(tmp_path / "tiny", num_layers=3, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        logits = model(torch.tensor([[97, 98, 99]])).logits
    assert logits.dtype == torch.float32
    assert logits.shape == (1, 3, 320)
    assert model.config.num_hidden_layers == 3
