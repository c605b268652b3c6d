"""Llama weights from a GGUF file, under their Hugging Face names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_weights(
    path: Path, *, num_attention_heads: int, num_key_value_heads: int
) -> dict[str, torch.Tensor]:
    """Dequantise every tensor of a Llama-architecture GGUF file to bf16.

    Raises:
        KeyError: a tensor has a name that a Llama model does not have.
    """
    import torch
    from gguf import GGUFReader, dequantize

    heads = {"attn_q": num_attention_heads, "attn_k": num_key_value_heads}
    weights = {}
    for tensor in GGUFReader(path).tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = halves_from_pairs(values, num_heads=heads[part])
        weights[hugging_face_name(tensor.name)] = torch.tensor(values, dtype=torch.bfloat16)
    return weights


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    *parents, part, kind = name.split(".")
    if parents:
        return f"model.layers.{parents[1]}.{_IN_LAYER[part]}.{kind}"
    return f"{_TOP[part]}.{kind}"


def halves_from_pairs(weight: Any, *, num_heads: int) -> Any:
    """Reorder the rows of a query or key projection, `(num_heads * head_dim, hidden)`.

    GGUF keeps the two rows that rotary embedding turns together next to each other; Hugging Face
    keeps all first ones of a head, then all second ones.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)
