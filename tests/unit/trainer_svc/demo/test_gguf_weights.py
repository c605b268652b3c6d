from __future__ import annotations

import numpy as np
import pytest

from trainer_svc.demo.gguf_weights import halves_from_pairs, hugging_face_name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight"),
        ("blk.29.attn_output.weight", "model.layers.29.self_attn.o_proj.weight"),
        ("blk.3.ffn_gate.weight", "model.layers.3.mlp.gate_proj.weight"),
    ],
)
def test_name(name: str, expected: str) -> None:
    assert hugging_face_name(name) == expected


def test_unknown_name_is_an_error() -> None:
    with pytest.raises(KeyError, match="ssm_in"):
        hugging_face_name("blk.0.ssm_in.weight")


def test_rows_of_each_head_are_parted() -> None:
    rows = np.arange(12).reshape(12, 1)
    parted = halves_from_pairs(rows, num_heads=2)
    assert parted.ravel().tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
