"""`merge` and `swap` of a trainer's configuration."""

from __future__ import annotations

import pytest

from common.config import load_config
from common.errors import ConfigError
from common.rules import Merge, Rules, Swap
from trainer_svc.config import PublishConfig, TrainerConfig

GIVEN = {"model": "m", "run_dir": "r", "rl.data": "d", "rl.reward": "m:f"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Rules()),
        ({"merge": "replica", "swap": "replica"}, Rules()),
        ({"merge": "never", "swap": "finish"}, Rules(Swap.FINISH, Merge.NEVER)),
        ({"merge": "rollout", "swap": "continue"}, Rules(Swap.CONTINUE, Merge.ROLLOUT)),
        ({"merge": "trainer", "swap": "abort"}, Rules(Swap.ABORT)),
    ],
)
def test_what_goes_with_every_version(given: dict[str, str], expected: Rules) -> None:
    """Nothing unless it is said; a merged model is merged already."""
    assert load_config(TrainerConfig, None, GIVEN | given).rules == expected
    if given.get("merge") != "trainer":
        assert load_config(PublishConfig, None, given).rules == expected


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"merge": "always"}, "merge: found 'always'; input should be .*'rollout' or 'trainer'"),
        ({"swap": "now"}, "swap: found 'now'; input should be 'replica', 'finish', 'abort' or"),
        (
            {"merge": "trainer", "adapter_dtype": "float32"},
            "adapter_dtype: float32 with merge = trainer, whose weights have the type of",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(more: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(TrainerConfig, None, GIVEN | more)


def test_nothing_but_a_trainer_can_merge_for_the_fleet() -> None:
    with pytest.raises(ConfigError, match="merge: found 'trainer'"):
        load_config(PublishConfig, None, {"merge": "trainer"})


@pytest.mark.parametrize("merge", ["replica", "rollout", "trainer"])
def test_dora_is_published_where_it_can_be_merged(merge: str) -> None:
    """As replicas are configured: whether they can serve it, their capabilities say."""
    load_config(TrainerConfig, None, GIVEN | {"lora.type": "dora", "merge": merge})
