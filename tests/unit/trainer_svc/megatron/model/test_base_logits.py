"""Logits of every architecture against Hugging Face's, in float32 on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny_models
from trainer_svc.megatron.model.build import build_model
from trainer_svc.megatron.model.forward import hidden_states, output_logits
from trainer_svc.megatron.model.layout import causal_layout

pytestmark = pytest.mark.usefixtures("ranks")

LENGTH = 3 * tiny_models.ORIGINAL_POSITIONS
TOKENS = torch.randint(
    0, tiny_models.VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(1)
)
WIDE_RAMP = tiny_models.YARN | {"rope_theta": 50.0, "beta_fast": 2.0, "beta_slow": 0.5}


@torch.no_grad()
def differences(path: Path) -> Tensor:
    """Between the logits of two sequences, packed here and as a batch there: (2, LENGTH)."""
    expected: Tensor = tiny_models.load(path)(TOKENS).logits
    assert expected.abs().max() > 1
    (model,) = build_model(path, dtype=torch.float32).chunks
    layout = causal_layout([LENGTH] * len(TOKENS))
    logits = output_logits(model, hidden_states(model, TOKENS.flatten(), layout=layout))
    return (logits.view_as(expected) - expected).abs().amax(dim=-1)


@pytest.mark.parametrize("name", tiny_models.ARCHITECTURES)
def test_logits_are_those_of_hugging_face(name: str, tmp_path: Path) -> None:
    path = tiny_models.save(name, tmp_path)
    assert differences(path).max() < 1e-5


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}),
        ("deepseek_v2", {"first_k_dense_replace": 0, "rms_norm_eps": 1e-3}),
        ("deepseek_v3", {"norm_topk_prob": False, "q_lora_rank": None}),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
        ("llama_yarn", {"rope_parameters": tiny_models.DEEPSEEK_YARN | {"truncate": False}}),
        ("llama_yarn", {"rope_parameters": WIDE_RAMP}),
    ],
)
def test_keys_count_as_in_hugging_face(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    path = tiny_models.save(name, tmp_path, **changes)
    assert differences(path).max() < 1e-5


def test_bfloat16_weights_round_once_and_correction_biases_stay_exact(tmp_path: Path) -> None:
    path = tiny_models.save("deepseek_v3", tmp_path)
    exact = build_model(path, dtype=torch.float32).chunks[0].state_dict()
    (model,) = build_model(path, dtype=torch.bfloat16).chunks
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            continue
        wanted = torch.float32 if name.endswith("expert_bias") else torch.bfloat16
        assert tensor.dtype is wanted, name
        assert torch.equal(tensor, exact[name].to(wanted)), name
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_recomputed_activations_give_the_same_gradients(name: str, tmp_path: Path) -> None:
    """With a frozen embedding, and two micro-batches of different layouts before the backward."""
    path = tiny_models.save(name, tmp_path)
    gradients = []
    for recompute in (False, True):
        (model,) = build_model(path, dtype=torch.float32, recompute=recompute).chunks
        weights = [layer.self_attention.linear_proj.weight for layer in model.decoder.layers]
        for weight in weights:
            weight.requires_grad_(True)
        hidden = [
            hidden_states(model, TOKENS[0], layout=causal_layout(lengths))
            for lengths in ([LENGTH], [10, LENGTH - 10])
        ]
        torch.autograd.backward(torch.stack(hidden).square().sum())
        gradients.append([weight.grad for weight in weights])
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain.abs().max() > 0
        assert torch.equal(plain, recomputed)
