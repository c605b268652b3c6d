from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from trainer_svc.megatron.lora.settings import LoraSettings
from trainer_svc.megatron.training.settings import TrainSettings


@pytest.mark.parametrize("alpha", [0, -1, float("inf"), float("nan")])
def test_an_alpha_that_is_not_above_zero_is_refused(alpha: float) -> None:
    """faults.md 14, verl#5325 and prime-rl#1729."""
    with pytest.raises(ValidationError, match="alpha"):
        LoraSettings(alpha=alpha)


@pytest.mark.parametrize(
    "name", ["lr", "weight_decay", "eps", "max_grad_norm", "clip_ratio_high", "kl_coef", "tis_cap"]
)
@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_numbers_of_the_update_are_finite_and_not_negative(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        TrainSettings.model_validate({name: value})


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, float("nan"))])
def test_betas_lie_below_one(betas: tuple[float, float]) -> None:
    with pytest.raises(ValidationError, match="betas"):
        TrainSettings(betas=betas)
    assert TrainSettings(betas=(0.0, 0.0)).betas == (0.0, 0.0)


def test_unknown_keys_are_refused() -> None:
    """faults.md 10, Megatron-Bridge create_peft."""
    with pytest.raises(ValidationError, match="lora_rank"):
        LoraSettings.model_validate({"lora_rank": 8})
    with pytest.raises(ValidationError, match="learning_rate"):
        TrainSettings.model_validate({"learning_rate": 1e-4})


@pytest.mark.parametrize("field", ["a_init", "b_init"])
@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "OLoRA", "loftq", "corda", "lora_ga"])
def test_an_init_that_changes_the_base_is_refused_with_the_reason(field: str, init: str) -> None:
    with pytest.raises(ValidationError, match="changes the base weights"):
        LoraSettings.model_validate({field: init})


def test_the_known_inits_are_accepted_under_pefts_name_too() -> None:
    assert LoraSettings.model_validate({"a_init": "gaussian"}).a_init == "normal"
    with pytest.raises(ValidationError, match="a_init"):
        LoraSettings.model_validate({"a_init": "zero"})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target_modules": []}, "trains nothing"),
        ({"target_modules": "linear_qkv"}, "target_modules"),
        ({"type": "vera"}, "lora', 'canonical_lora' or 'dora"),
        ({"rank_pattern": {"linear_qkv": 0}}, "rank_pattern"),
        ({"alpha_pattern": {"linear_qkv": 0}}, "alpha_pattern"),
        ({"dropout": 1}, "dropout"),
        ({"type": "dora", "experts": "shared"}, "experts = per_expert"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LoraSettings.model_validate(values)


def test_the_service_side_loads_no_torch() -> None:
    code = (
        "import sys, trainer_svc.megatron.client, trainer_svc.rl.advantage\n"
        "import trainer_svc.megatron.lora.plan\n"
        "print(sorted({'torch', 'megatron', 'numpy'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"
