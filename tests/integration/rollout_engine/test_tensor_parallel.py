"""Two tensor-parallel ranks answer as one does, from slots and from merged weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from blake3 import blake3
from transformers import LlamaForCausalLM

from rollout_svc.config import RolloutConfig
from rollout_svc.engine import EngineAdapter
from rollout_svc.vllm_engine.engine import VllmEngine
from tests.integration.rollout_engine.tiny import LAYERS, RANK, VOCAB, WIDTHS, AdapterMaker
from tests.peft_adapters import save_adapter

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(180)]

IDS = tuple(number * 37 % VOCAB for number in range(100))
RANKS = 2
MODULES = LAYERS * len(WIDTHS)


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def two_ranks(config: RolloutConfig) -> AsyncIterator[VllmEngine]:
    settings = config.engine | {"tensor_parallel_size": RANKS}
    engine = await VllmEngine.start(config.model_copy(update={"engine": settings}))
    yield engine
    engine.shutdown()


@pytest_asyncio.fixture(loop_scope="package")
async def engines(
    engine: VllmEngine, two_ranks: VllmEngine, model_dir: Path
) -> AsyncIterator[tuple[VllmEngine, VllmEngine]]:
    """One of one rank, one of two; both have their base back afterwards."""
    yield engine, two_ranks
    for used in (engine, two_ranks):
        await used.load_weights(model_dir)


@pytest.fixture
def loaded(adapters: AdapterMaker) -> tuple[EngineAdapter, EngineAdapter]:
    """Of two ranks, as the engines shall load them."""
    paths = adapters.make(seed=1)[1], adapters.make(seed=2, rank=RANK // 2)[1]
    first, second = (EngineAdapter(800 + i, f"twin-{i}", path) for i, path in enumerate(paths))
    return first, second


def close(found: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-5, rtol=0)


async def test_slots_of_two_ranks_answer_as_those_of_one(
    engines: tuple[VllmEngine, VllmEngine], loaded: tuple[EngineAdapter, EngineAdapter]
) -> None:
    """faults.md 7, TRL#7017: on every rank, or the sum over ranks would be another one.

    Adapters of different ranks: alternating, and in one batch with the base, as each alone.
    """
    answers = []
    for engine in engines:
        for adapter in loaded:
            reports = await engine.load(adapter)
            assert [(r.error, r.bound_modules) for r in reports] == [("", MODULES)] * len(reports)
            assert len({r.digest for r in reports}) == 1
        turns = [None, *loaded, None, *loaded]
        one_by_one = [await engine.score(adapter, IDS) for adapter in turns]
        assert one_by_one[:3] == one_by_one[3:]
        together = await asyncio.gather(*(engine.score(adapter, IDS) for adapter in turns))
        for mixed, alone in zip(together, one_by_one, strict=True):
            close(mixed, alone)
        answers.append(one_by_one[:3])
        for adapter in loaded:
            await engine.unload(adapter.id)
    base, first, second = answers[0]
    assert base != first != second
    for of_one, of_two in zip(*answers, strict=True):
        close(of_two, of_one)


@pytest.mark.parametrize("use_dora", [False, True])
async def test_merged_weights_of_two_ranks_answer_as_those_of_one(
    engines: tuple[VllmEngine, VllmEngine],
    model_dir: Path,
    reference: LlamaForCausalLM,
    tmp_path: Path,
    use_dora: bool,
) -> None:
    """faults.md 7, TRL#7017: each rank says which bytes it has read."""
    path = save_adapter(reference, tmp_path / "adapter", use_dora=use_dora)
    digest = blake3((path / "adapter_model.safetensors").read_bytes()).hexdigest()
    answers = []
    for engine, ranks in zip(engines, (1, RANKS), strict=True):
        before = await engine.score(None, IDS)
        reports = await engine.merge(path, base=model_dir)
        found = [(r.error, r.mismatches, r.bound_modules, r.digest) for r in reports]
        assert found == [("", (), MODULES, digest)] * ranks
        answers.append(await engine.score(None, IDS))
        await engine.merge(None, base=model_dir)
        assert await engine.score(None, IDS) == before != answers[-1]
    close(answers[1], answers[0])
