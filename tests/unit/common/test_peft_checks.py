"""What a configuration must be to be trained on, and what to be served."""

from __future__ import annotations

from typing import Any

import pytest
from peft import LoraConfig as PeftLoraConfig

from common.adapter import LoraConfig
from common.errors import ConfigError
from common.peft_checks import check_served, lora_config
from common.peft_dir import peft_config

GIVEN: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
PATTERNS = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r".*\.1\.self_attn.q_proj": 3}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora = True cannot be served; remove it"),
        ({"rank_pattern": {"q_proj": 2}}, r"rank_pattern = {'q_proj': 2} cannot be served"),
        ({"alpha_pattern": {"q_proj": 2}}, r"alpha_pattern = {'q_proj': 2} cannot be served"),
    ],
)
def test_what_a_trainer_takes_is_not_all_that_can_be_published(
    change: dict[str, Any], message: str
) -> None:
    check_served("f", lora_config("f", GIVEN))
    with pytest.raises(ConfigError, match=f"^f: {message}"):
        check_served("f", lora_config("f", GIVEN | change))


def test_ranks_and_scales_of_modules_are_those_of_peft() -> None:
    """The first pattern that matches the name's end counts, as PEFT's `get_pattern_key` has it."""
    lora = lora_config("f", GIVEN | PATTERNS)
    first, second = (f"model.layers.{n}.self_attn.q_proj" for n in (0, 1))
    down = "model.layers.1.mlp.down_proj"
    assert [lora.rank_of(name) for name in (first, second, down)] == [2, 2, 4]
    assert [lora.scale_of(name) for name in (first, second, down)] == [4.0, 1.5, 2.0]
    assert lora.rank_of("model.layers.0.xq_proj") == 4
    stable = lora_config("f", GIVEN | PATTERNS | {"use_rslora": True})
    assert stable.scale_of(second) == pytest.approx(3 / 2**0.5)


def test_a_configuration_survives_peft() -> None:
    lora = LoraConfig(
        rank=4,
        alpha=8.0,
        target_modules=("experts", "gate", "q_proj"),
        use_rslora=True,
        use_dora=True,
        rank_pattern=(("q_proj", 2),),
        alpha_pattern=(("q_proj", 3.0),),
    )
    of_peft: Any = PeftLoraConfig(**peft_config(lora, "base"))
    assert of_peft.target_modules == {"gate", "q_proj"}
    assert of_peft.target_parameters == ["experts.gate_up_proj", "experts.down_proj"]
    given = of_peft.to_dict() | {"target_modules": sorted(of_peft.target_modules)}
    assert lora_config("f", given) == lora


def test_a_router_as_a_parameter_is_a_gate() -> None:
    given = GIVEN | {"target_modules": None, "target_parameters": ["mlp.gate.weight"]}
    assert lora_config("f", given).target_modules == ("gate",)
