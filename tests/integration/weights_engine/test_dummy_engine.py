"""Merged weights and base sync in a real engine that started on random weights."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM

from common.model_dir import BaseModel
from rollout_svc.adapters import AdapterRegistry
from rollout_svc.config import RolloutConfig
from rollout_svc.selector import Rule, Selector
from rollout_svc.vllm_engine import VllmEngine
from tests.integration.rollout_engine.tiny import (
    GREEDY,
    LAYERS,
    PROMPT,
    AdapterMaker,
    expected_logprobs,
    logprobs,
    sample,
    tokens,
)
from tests.integration.weights_engine.weights import (
    MergedMaker,
    base_content,
    staged,
)

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(180)]

TRAINER = "trainer:50051"
LATEST = Selector(Rule.LATEST, "default")


@pytest.fixture(scope="module")
def weightless_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without its weights."""
    path = tmp_path_factory.mktemp("weightless") / "tiny"
    return Path(shutil.copytree(model_dir, path, ignore=shutil.ignore_patterns("*.safetensors")))


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def dummy(config: RolloutConfig, weightless_dir: Path) -> AsyncIterator[VllmEngine]:
    settings = config.engine | {"load_format": "dummy"}
    engine = await VllmEngine.start(
        config.model_copy(update={"model": weightless_dir, "engine": settings})
    )
    yield engine
    engine.shutdown()


@pytest_asyncio.fixture(loop_scope="package")
async def bare(dummy: VllmEngine) -> AsyncIterator[AdapterRegistry]:
    registry = AdapterRegistry(
        engine=dummy,
        base=BaseModel("tiny", ""),
        base_missing=True,
        slots=3,
        keep_versions=2,
        slot_wait_seconds=20.0,
    )
    unloading = asyncio.create_task(registry.run())
    yield registry
    unloading.cancel()
    for live in registry._live:
        await dummy.unload(live.loaded.id)


@pytest.fixture
def merged(adapters: AdapterMaker, model_dir: Path, tmp_path: Path) -> MergedMaker:
    return MergedMaker(adapters, model_dir, tmp_path)


async def test_base_sync_and_an_adapter_equal_loading_both_from_disk(
    dummy: VllmEngine,
    bare: AdapterRegistry,
    adapters: AdapterMaker,
    model_dir: Path,
    tmp_path: Path,
    reference: LlamaForCausalLM,
) -> None:
    """faults.md 11, vllm#31104: into linears that vLLM has wrapped as `base_layer`."""
    random = await sample(dummy, None)
    base = base_content(model_dir)
    committed = await bare.commit(base, staged(base, tmp_path / "base"), source=TRAINER)
    # Four linears, packed, and two norms a layer; embedding, last norm and output layer.
    assert [report.bound_modules for report in committed.reports] == [6 * LAYERS + 3]
    content, path = adapters.make(seed=1)
    await bare.commit(content, path, source=TRAINER)

    plain = await sample(dummy, None)
    assert tokens(plain) != tokens(random)
    async with bare.admit(LATEST, wait_seconds=1) as live:
        adapted = await sample(dummy, live)
    for answer, weights in ((plain, None), (adapted, path)):
        expected = expected_logprobs(reference, weights, PROMPT, tokens(answer))
        torch.testing.assert_close(torch.tensor(logprobs(answer)), expected, atol=1e-3, rtol=0)


async def test_a_merged_version_answers_as_its_adapter_would(
    dummy: VllmEngine,
    bare: AdapterRegistry,
    merged: MergedMaker,
    reference: LlamaForCausalLM,
) -> None:
    """faults.md 19: each version in turn, whatever the one before has cached of the prompt."""
    prompt = PROMPT * 8
    for seed in (1, 2):
        content, path, peft_dir = merged(seed)
        await bare.commit(content, path, source=TRAINER)
        async with bare.admit(LATEST, wait_seconds=1) as live:
            assert live is not None and live.lora is None
            answer = await sample(dummy, live, prompt=prompt)
        expected = expected_logprobs(reference, peft_dir, prompt, tokens(answer))
        torch.testing.assert_close(torch.tensor(logprobs(answer)), expected, atol=1e-3, rtol=0)
        assert bare.listing() == [content.ref]


async def test_a_running_generation_ends_on_its_own_merged_weights(
    dummy: VllmEngine, bare: AdapterRegistry, merged: MergedMaker
) -> None:
    """faults.md 20: swap rule `finish`; the newer version waits for it."""
    long = replace(GREEDY, max_tokens=200)
    (first, first_path, _), (second, second_path, _) = merged(3), merged(4)
    await bare.commit(first, first_path, source=TRAINER)
    async with bare.admit(LATEST, wait_seconds=1) as live:
        undisturbed = await sample(dummy, live, sampling=long)
        running = asyncio.create_task(sample(dummy, live, sampling=long))
        switch = asyncio.create_task(bare.commit(second, second_path, source=TRAINER))
        disturbed = await running
        assert not switch.done()
    await switch
    assert (tokens(disturbed), logprobs(disturbed)) == (tokens(undisturbed), logprobs(undisturbed))
    async with bare.admit(LATEST, wait_seconds=1) as live:
        assert tokens(await sample(dummy, live)) != tokens(disturbed)[: GREEDY.max_tokens]
