"""What a run publishes beside its policy, and what does not go together."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trainer_svc.config import TrainerConfig


def _config(rl: dict[str, Any], **top: Any) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {"model": "m", "run_dir": "r", "rl": {"data": "d", "reward": "w", **rl}, **top}
    )


def test_a_run_publishes_its_policy_alone_unless_told() -> None:
    assert _config({}).side_policies == ()
    both = _config({"old_policy": {"interval": 4, "decay": 0.5}, "publish_reference": True})
    assert both.side_policies == ("old", "reference")
    assert _config({"publish_reference": True}).side_policies == ("reference",)


@pytest.mark.parametrize(
    ("rl", "top", "message"),
    [
        ({"publish_reference": True}, {"merge": "trainer"}, "serves one policy"),
        (
            {"publish_reference": True, "old_policy": {}},
            {"merge": "rollout"},
            "merge: rollout, with old and reference published; .* serves one policy",
        ),
        (
            {},
            {"lora": {"type": "dora"}, "merge": "never"},
            "dora, which no LoRA slot serves; set merge = rollout or trainer",
        ),
        (
            {"publish_reference": True},
            {"lora": {"type": "dora"}},
            "dora, with reference published, which no LoRA slot serves; .* the policy alone",
        ),
        ({"old_policy": {}}, {"adapter": "old"}, "rename the policy"),
        ({}, {"train": {"kl_to": "old"}}, "set rl.old_policy"),
        ({"old_policy": {"decay": 1.5}}, {}, "less than or equal to 1"),
        ({"old_policy": {"interval": 0}}, {}, "greater than or equal to 1"),
    ],
)
def test_what_does_not_go_together_is_refused(
    rl: dict[str, Any], top: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        _config(rl, **top)
