"""What the documents show is what the code takes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from rollout_svc.config import RolloutConfig
from tests.token_batches import make_tokens
from trainer_svc.config import TrainerConfig
from trainer_svc.megatron.training.settings import TrainSettings

ROOT = Path(__file__).parents[2]


def _blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


@pytest.mark.parametrize("document", ["README.md", "docs/training.md", "docs/openai.md"])
def test_a_configuration_is_accepted(document: str) -> None:
    blocks = [tomllib.loads(block) for block in _blocks(document, "toml")]
    assert blocks
    for block in blocks:
        config = TrainerConfig if "rl" in block else RolloutConfig
        assert config.model_validate(block).model == Path("models/smollm2")


def test_a_loss_is_one() -> None:
    [block] = _blocks("docs/training.md", "python")
    names: dict[str, object] = {}
    exec(block, names)
    tokens = make_tokens(ratios=[1.5, 0.5], advantages=[1.0, -2.0])
    found = names["loss"](tokens, TrainSettings())  # type: ignore[operator]
    assert found.per_token.tolist() == [
        -advantage * logprob
        for advantage, logprob in zip([1.0, -2.0], tokens.logprobs.tolist(), strict=True)
    ]
