from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.config import load_config
from common.errors import ConfigError
from rollout_svc.config import RolloutConfig


def test_the_engines_arguments_are_kept_as_given() -> None:
    config = load_config(RolloutConfig, None, {"model": "m", "engine.max_model_len": "64"})
    assert (config.model, config.engine) == (Path("m"), {"max_model_len": 64})


def test_dummy_weights_are_to_be_sent() -> None:
    given = {"model": "m", "trainer_address": "h:1", "engine.load_format": "dummy"}
    assert load_config(RolloutConfig, None, given).starts_without_weights
    given["engine.load_format"] = "auto"
    assert not load_config(RolloutConfig, None, given).starts_without_weights


def test_the_staging_directory_is_the_users_own() -> None:
    config = load_config(RolloutConfig, None, {"model": "m"})
    assert config.staging_dir == Path(f"/dev/shm/refit-{os.getuid()}")


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"modle": "m"}, "unknown key 'modle'; did you mean 'model'?"),
        ({"model": "m", "max_loras": "1"}, "max_loras: 1; one slot must stay free"),
        ({"model": "m", "max_loras": "0"}, "max_loras: 0 with merge = never"),
        ({"model": "m", "port": "70000"}, "port: found 70000"),
        ({"model": "m", "max_lora_rank": "17"}, "max_lora_rank: found 17; input should be 1, 8, "),
        (
            {"model": "m", "engine.load_format": "dummy"},
            "engine.load_format: dummy without a trainer_address",
        ),
        ({"model": "m", "trainer_address": "a:1,b"}, "trainer_address: .*'b' is no host:port"),
    ],
)
def test_a_bad_configuration_is_one_clear_line(overrides: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + text.replace("?", r"\?")):
        load_config(RolloutConfig, None, overrides)
