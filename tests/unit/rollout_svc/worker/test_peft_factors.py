"""Factors of a PEFT directory: what they make of a weight, and what does not fit one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rollout_svc.engine import Mismatch, MismatchReason
from rollout_svc.worker.peft_factors import PeftFactors
from tests.peft_adapters import ALL_LINEAR, merged_model, save_adapter

CPU = torch.device("cpu")
MODULE = "model.layers.0.mlp.up_proj"
SHAPE = (48, 32)
A_NAME, B_NAME = (f"base_model.model.{MODULE}.{factor}.weight" for factor in ("lora_A", "lora_B"))

MAGNITUDE_NAME = f"base_model.model.{MODULE}.lora_magnitude_vector"


def make_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def weight_of(model: PreTrainedModel, module: str) -> Tensor:
    return model.get_parameter(f"{module}.weight").detach().clone()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_adapter(make_model(), tmp_path / "adapter")


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"use_dora": True, "target_modules": ["up_proj", "q_proj"]},
        {"rank_pattern": {"up_proj": 2}, "alpha_pattern": {"q_proj": 5}},
    ],
    ids=str,
)
def test_the_sum_is_what_peft_merges(tmp_path: Path, settings: dict[str, Any]) -> None:
    base = make_model()
    factors = PeftFactors(save_adapter(base, tmp_path / "adapter", **settings))
    assert len(factors) == len(settings.get("target_modules", ALL_LINEAR))
    merged = merged_model(make_model(), tmp_path / "adapter")
    for module, change in factors.items():
        weight = weight_of(base, module)
        found = change.add_to(weight, dtype=torch.float32, device=CPU)
        torch.testing.assert_close(found, weight_of(merged, module), atol=1e-6, rtol=0)
        assert (found - weight).abs().max() > 0.05


def test_the_sum_is_rounded_once(path: Path) -> None:
    """faults.md 16, TRL#6688: neither the product nor the base's part is rounded before."""
    change = PeftFactors(path)[MODULE]
    weight = weight_of(make_model(), MODULE).bfloat16()
    found = change.add_to(weight, dtype=torch.bfloat16, device=CPU)
    exact = weight.double() + 2 * change.b.double() @ change.a.double()
    # Half of bfloat16's last place, and what fp32 itself rounds.
    half = torch.finfo(torch.bfloat16).eps / 2
    assert ((found.double() - exact).abs() <= exact.abs() * half + 1e-6).all()
    assert found.dtype is torch.bfloat16


def test_the_base_weight_stays_as_it_is(path: Path) -> None:
    """faults.md 15, miles#1087: also where it is fp32 already."""
    weight = torch.ones(SHAPE)
    PeftFactors(path)[MODULE].add_to(weight, dtype=torch.float32, device=CPU)
    assert torch.equal(weight, torch.ones(SHAPE))


def test_the_digest_is_of_the_files_bytes(path: Path) -> None:
    content = (path / "adapter_model.safetensors").read_bytes()
    assert PeftFactors(path).digest == blake3(content).hexdigest()


def test_factors_that_do_not_fit_are_named(path: Path) -> None:
    """faults.md 8, vllm#55193."""
    factors = PeftFactors(path)
    assert factors.misfits(MODULE, SHAPE) == []
    assert factors.misfits(MODULE, (48, 31)) == [
        Mismatch(A_NAME, MismatchReason.SHAPE, "(4, 32), the module takes (4, 31)")
    ]
    assert factors.misfits(MODULE, (47, 32)) == [
        Mismatch(B_NAME, MismatchReason.SHAPE, "(48, 4), the module takes (47, 4)")
    ]


@pytest.mark.parametrize(
    ("use_dora", "lost", "needed"),
    [
        (False, B_NAME, "lora_A, lora_B"),
        (True, MAGNITUDE_NAME, "lora_A, lora_B, lora_magnitude_vector"),
    ],
)
def test_a_module_that_lacks_a_factor_takes_none(
    tmp_path: Path, use_dora: bool, lost: str, needed: str
) -> None:
    path = save_adapter(make_model(), tmp_path / "adapter", use_dora=use_dora)
    tensors = load_file(path / "adapter_model.safetensors")
    del tensors[lost]
    save_file(tensors, path / "adapter_model.safetensors")
    left = [name for name in (A_NAME, B_NAME, MAGNITUDE_NAME) if name in tensors]
    found = ", ".join(name.removesuffix(".weight").rpartition(".")[2] for name in left)
    detail = f"its module has {found} and needs {needed}"
    misfits = PeftFactors(path).misfits(MODULE, SHAPE)
    assert sorted(misfits) == [Mismatch(name, MismatchReason.KIND, detail) for name in left]
    assert {m.detail for m in misfits} == {detail}


def test_a_tensor_that_is_no_factor_is_named(path: Path) -> None:
    file = path / "adapter_model.safetensors"
    save_file(load_file(file) | {"lm_head.weight": torch.zeros(2)}, file)
    assert PeftFactors(path).strangers() == [Mismatch("lm_head.weight", MismatchReason.KIND)]
