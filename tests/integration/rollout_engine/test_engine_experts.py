"""Weights of experts in a real engine: packed when they are loaded, and when they change."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.rules import Merge
from rollout_svc.config import RolloutConfig
from rollout_svc.vllm_engine.engine import VllmEngine
from tests import tiny_models

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(180)]

IDS = tuple(number * 37 % tiny_models.VOCAB_SIZE for number in range(60))
# Such that the CPU's kernel, which takes multiples of 32, has to pad the experts.
SIZES = {"head_dim": 32, "moe_intermediate_size": 24}
RANK, ALPHA = 4, 2
EXPERT = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("qwen3_moe", tmp_path_factory.mktemp("mixture"), **SIZES)


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def experts(config: RolloutConfig, mixture: Path) -> AsyncIterator[VllmEngine]:
    settings = config.engine | {"max_model_len": 128, "skip_tokenizer_init": True}
    updates = {"model": mixture, "max_loras": 0, "merge": Merge.ROLLOUT, "engine": settings}
    engine = await VllmEngine.start(config.model_copy(update=updates))
    yield engine
    engine.shutdown()


def scores_of(model_dir: Path) -> Tensor:
    """Hugging Face's log-probability of each of the tokens but the first."""
    logits: Tensor = tiny_models.load(model_dir)(torch.tensor([IDS])).logits[0, :-1].detach()
    return logits.log_softmax(-1).gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0]


def save_adapter(model_dir: Path, path: Path) -> Path:
    """A random adapter of every expert, and beside it the model that it makes, by the formula."""
    generator = torch.Generator().manual_seed(0)
    weights = load_file(model_dir / "model.safetensors")
    factors: dict[str, Tensor] = {}
    for name in [name for name in weights if ".experts." in name]:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        a = torch.rand(RANK, weights[name].shape[1], generator=generator) - 0.5
        b = torch.rand(weights[name].shape[0], RANK, generator=generator) - 0.5
        factors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        weights[name] = weights[name] + ALPHA / RANK * b @ a
    path.mkdir()
    save_file(factors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": EXPERT}
    (path / "adapter_config.json").write_text(json.dumps(config))
    merged = path / "merged"
    merged.mkdir()
    save_file(weights, merged / "model.safetensors")
    (merged / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    return path


async def test_experts_take_an_adapter_and_whole_weights(
    experts: VllmEngine, mixture: Path, tmp_path: Path
) -> None:
    """faults.md 11, vllm#31104: and are the base's again when it is put back."""
    assert experts.capabilities.merging
    assert set(EXPERT) < set(experts.capabilities.merging.target_modules)
    base = await experts.score(None, IDS)
    torch.testing.assert_close(torch.tensor(base), scores_of(mixture), atol=1e-4, rtol=0)
    path = save_adapter(mixture, tmp_path / "adapter")
    expected = scores_of(path / "merged")
    assert (expected - scores_of(mixture)).abs().max() > 0.1

    (report,) = await experts.merge(path, base=mixture)
    assert (report.error, report.mismatches) == ("", ())
    assert report.bound_modules == 2 * 4 * len(EXPERT)
    merged = await experts.score(None, IDS)
    torch.testing.assert_close(torch.tensor(merged), expected, atol=1e-4, rtol=0)
    await experts.merge(None, base=mixture)
    assert await experts.score(None, IDS) == base

    await experts.load_weights(path / "merged")
    assert await experts.score(None, IDS) == merged


async def test_a_failed_reload_leaves_the_experts_as_they_were(
    experts: VllmEngine, mixture: Path, tmp_path: Path
) -> None:
    """faults.md 22, AReaL#1160: it ends at the first tensor, before any expert's."""
    await experts.load_weights(mixture)
    before = await experts.score(None, IDS)
    weights = load_file(mixture / "model.safetensors")
    weights["model.embed_tokens.weight"] = torch.zeros(3, 3)
    save_file(weights, tmp_path / "model.safetensors")
    assert [name for name in weights if name < "model.embed_tokens.weight"] == ["lm_head.weight"]
    (report,) = await experts.load_weights(tmp_path)
    assert report.error
    assert await experts.score(None, IDS) == before
