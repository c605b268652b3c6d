"""The output layer's fp32 weights, which a CPU engine keeps from step to step."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from rollout_svc.config import RolloutConfig
from rollout_svc.vllm_engine.engine import VllmEngine
from tests.integration.rollout_engine.tiny import PROMPT

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(120)]


@pytest_asyncio.fixture(loop_scope="package")
async def rounded(config: RolloutConfig) -> AsyncIterator[VllmEngine]:
    """In bf16, so that the output layer is computed in another type than it is stored in."""
    settings = config.engine | {"dtype": "bfloat16"}
    engine = await VllmEngine.start(config.model_copy(update={"max_loras": 0, "engine": settings}))
    yield engine
    engine.shutdown()


@torch.no_grad()
def scores(path: Path) -> torch.Tensor:
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    head = model.lm_head.weight.float()
    hidden = model.model(torch.tensor([PROMPT])).last_hidden_state[0, :-1].float()
    rows: torch.Tensor = (hidden @ head.T).log_softmax(-1)
    return rows.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


async def test_a_reloaded_output_layer_answers_with_its_new_weights(
    rounded: VllmEngine, model_dir: Path, tmp_path: Path
) -> None:
    weights = load_file(model_dir / "model.safetensors")
    weights["lm_head.weight"] = -weights["lm_head.weight"]
    other = Path(shutil.copytree(model_dir, tmp_path / "other"))
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    first = await rounded.score(None, PROMPT)
    (report,) = await rounded.load_weights(other)
    assert not report.error
    second = await rounded.score(None, PROMPT)
    await rounded.load_weights(model_dir)
    assert await rounded.score(None, PROMPT) == first
    for found, path in ((first, model_dir), (second, other)):
        torch.testing.assert_close(torch.tensor(found), scores(path), atol=0.05, rtol=0)
    assert (torch.tensor(first) - torch.tensor(second)).abs().mean() > 0.5
