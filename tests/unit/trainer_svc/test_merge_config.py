"""`merge` of a trainer's configuration."""

from __future__ import annotations

import pytest

from common.config import load_config
from common.errors import ConfigError
from trainer_svc.config import TrainerConfig

GIVEN = {"model": "m", "run_dir": "r", "rl.data": "d", "rl.reward": "m:f"}


def test_adapters_are_published_unless_said_otherwise() -> None:
    assert load_config(TrainerConfig, None, GIVEN).merge == "never"
    assert load_config(TrainerConfig, None, GIVEN | {"merge": "trainer"}).merge == "trainer"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"merge": "rollout"}, "merge: found 'rollout'; input should be 'never' or 'trainer'"),
        (
            {"merge": "trainer", "adapter_dtype": "float32"},
            "adapter_dtype: float32 with merge = trainer, whose weights have the type of",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(more: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(TrainerConfig, None, GIVEN | more)
