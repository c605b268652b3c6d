"""Merged weights and base sync in a real engine that started on random weights."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from common.adapter import (
    BASE_NAME,
    AdapterRef,
    Kind,
    Layout,
    LoraConfig,
    Manifest,
    TensorEntry,
    plan,
    seal,
)
from common.errors import Incompatible
from common.model_dir import BaseModel, base_model
from common.stream.content import Content
from rollout_svc.config import RolloutConfig
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.versions.selector import Rule, Selector
from rollout_svc.vllm_engine.engine import VllmEngine
from tests.integration.rollout_engine.tiny import (
    GREEDY,
    LAYERS,
    PROMPT,
    AdapterMaker,
    expected_logprobs,
    logprobs,
    registry_of,
    sample,
    tokens,
)
from tests.live import admit
from tests.whole_weights import stage
from trainer_svc.base_weights import read_base

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
    async with registry_of(dummy, BaseModel("tiny", ""), model=None) as registry:
        yield registry


class MergedMaker:
    """Stages merged versions of random adapters."""

    def __init__(self, adapters: AdapterMaker, model_dir: Path, parent: Path) -> None:
        self._adapters, self._model_dir, self._parent = adapters, model_dir, parent

    def __call__(self, seed: int) -> tuple[Content, Path, Path]:
        """The content, where it is staged, and the PEFT directory that it is merged from."""
        adapter, peft_dir = self._adapters.make(seed=seed)
        content = merged_content(self._model_dir, adapter, peft_dir)
        return content, stage(content, self._parent / f"merged-{seed}"), peft_dir


@pytest.fixture
def merged(adapters: AdapterMaker, model_dir: Path, tmp_path: Path) -> MergedMaker:
    return MergedMaker(adapters, model_dir, tmp_path)


def base_content(model_dir: Path) -> Content:
    read = read_base(model_dir, base_fingerprint=base_model(model_dir).fingerprint)
    ref = AdapterRef("run", BASE_NAME, 1, read.manifest.digest())
    return Content.whole(ref, read.manifest, read.buffer)


def merged_content(model_dir: Path, adapter: Content, path: Path) -> Content:
    """The whole model with a PEFT directory's adapter in it, by the formula."""
    weights = load_file(model_dir / "model.safetensors")
    factors = load_file(path / "adapter_model.safetensors")
    assert isinstance(adapter.manifest.lora, LoraConfig)
    for name in [name for name in factors if ".lora_A." in name]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = factors[name].float(), factors[name.replace(".lora_A.", ".lora_B.")].float()
        weight = weights[f"{module}.weight"]
        weights[f"{module}.weight"] = weight + adapter.manifest.lora.scale * (b @ a)
    return weights_content(weights, adapter)


def weights_content(weights: dict[str, Tensor], like: Content) -> Content:
    dtype = like.manifest.tensors[0].dtype
    specs = plan(
        TensorEntry(name, dtype, tuple(weight.shape), Layout.WEIGHT)
        for name, weight in weights.items()
    )
    buffer = memoryview(b"".join(weights[spec.name].numpy().tobytes() for spec in specs))
    fingerprint = like.manifest.base_fingerprint
    manifest = Manifest(fingerprint, None, seal(specs, buffer), Kind.MERGED)
    return Content.whole(replace(like.ref, digest=manifest.digest()), manifest, buffer)


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
    committed = await bare.commit(base, stage(base, tmp_path / "base"), source=TRAINER)
    # Four linears, packed, and two norms a layer; embedding, last norm and output layer.
    assert [report.bound_modules for report in committed.reports] == [6 * LAYERS + 3]
    content, path = adapters.make(seed=1)
    await bare.commit(content, path, source=TRAINER)

    plain = await sample(dummy, None)
    assert tokens(plain) != tokens(random)
    async with admit(bare, LATEST, wait_seconds=1) as live:
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
        async with admit(bare, LATEST, wait_seconds=1) as live:
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
    async with admit(bare, LATEST, wait_seconds=1) as live:
        undisturbed = await sample(dummy, live, sampling=long)
        running = asyncio.create_task(sample(dummy, live, sampling=long))
        switch = asyncio.create_task(bare.commit(second, second_path, source=TRAINER))
        disturbed = await running
        assert not switch.done()
    await switch
    assert (tokens(disturbed), logprobs(disturbed)) == (tokens(undisturbed), logprobs(undisturbed))
    async with admit(bare, LATEST, wait_seconds=1) as live:
        assert tokens(await sample(dummy, live)) != tokens(disturbed)[: GREEDY.max_tokens]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w | {"model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)},
            r"1 tensors found no module: model\.layers\.9\.mlp\.up_proj\.weight",
        ),
        (
            lambda w: {name: w[name] for name in w if "layers.1.mlp.down_proj" not in name},
            r"no tensor fills 1 parameters, as model\.layers\.1\.mlp\.down_proj\.base_layer",
        ),
        (lambda w: w | {"model.norm.weight": torch.zeros(7)}, "the engine refused it"),
    ],
)
async def test_weights_that_do_not_fit_leave_the_engine_as_it_was(
    engine: VllmEngine,
    registry: AdapterRegistry,
    adapters: AdapterMaker,
    model_dir: Path,
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    message: str,
) -> None:
    """faults.md 8 and 26: refused by name; what half a load has changed is loaded again."""
    before = await sample(engine, None)
    adapter, _ = adapters.make(seed=5)
    weights = change(load_file(model_dir / "model.safetensors"))
    bad = weights_content(weights, adapter)
    with pytest.raises(Incompatible, match=message):
        await registry.commit(bad, stage(bad, tmp_path / "bad"), source=TRAINER)
    registry.weights.check_whole()
    after = await sample(engine, None, cache_salt="never used before")
    assert (tokens(after), logprobs(after)) == (tokens(before), logprobs(before))
    assert registry.listing() == []
