"""Adapters summed into a real engine's weights."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from common.adapter import Layout
from common.rules import Merge
from rollout_svc.config import RolloutConfig
from rollout_svc.engine import BoundReport, EngineAdapter, Mismatch, MismatchReason
from rollout_svc.vllm_engine.engine import VllmEngine
from tests.integration.rollout_engine.tiny import (
    HIDDEN,
    LAYERS,
    RANK,
    VOCAB,
    WIDTHS,
    expected_logprobs,
)
from tests.peft_adapters import ALL_LINEAR, save_adapter

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(180)]

IDS = tuple(number * 37 % VOCAB for number in range(100))
MERGES = 1000


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def slotless(config: RolloutConfig) -> AsyncIterator[VllmEngine]:
    """Without LoRA slots, and in bfloat16, where rounding would add up."""
    settings = config.engine | {"dtype": "bfloat16"}
    engine = await VllmEngine.start(
        config.model_copy(update={"max_loras": 0, "merge": Merge.ROLLOUT, "engine": settings})
    )
    yield engine
    engine.shutdown()


@pytest_asyncio.fixture(loop_scope="package")
async def slotted(engine: VllmEngine, model_dir: Path) -> AsyncIterator[VllmEngine]:
    """The directory's engine, which has its base back afterwards."""
    yield engine
    await engine.load_weights(model_dir)


class Saver:
    """Writes PEFT directories for the tiny model."""

    def __init__(self, model: LlamaForCausalLM, parent: Path) -> None:
        self._model, self._parent = model, parent

    def __call__(self, *, seed: int = 0, **settings: Any) -> Path:
        path = self._parent / f"adapter-{len(list(self._parent.iterdir()))}"
        return save_adapter(self._model, path, seed=seed, **settings)


@pytest.fixture
def save(reference: LlamaForCausalLM, tmp_path: Path) -> Saver:
    return Saver(reference, tmp_path)


def reference_scores(model: LlamaForCausalLM, path: Path | None) -> Tensor:
    return expected_logprobs(model, path, IDS[:1], IDS[1:])


async def merge(engine: VllmEngine, path: Path | None, base: Path) -> BoundReport:
    """The only rank's report, of a merge that must work."""
    (report,) = await engine.merge(path, base=base)
    assert (report.error, report.mismatches) == ("", ())
    return report


def resident_mib() -> float:
    """Of this process and all under it."""
    own = psutil.Process()
    sizes: list[int] = [p.memory_info().rss for p in (own, *own.children(recursive=True))]
    return sum(sizes) / (1 << 20)


async def test_an_engine_says_what_it_can_merge(slotted: VllmEngine, slotless: VllmEngine) -> None:
    for engine, slots in ((slotted, 3), (slotless, 0)):
        capabilities, merging = engine.capabilities, engine.capabilities.merging
        assert merging and set(merging.target_modules) == set(ALL_LINEAR)
        assert set(merging.layouts) == {Layout.LORA_A, Layout.LORA_B, Layout.MAGNITUDE}
        assert capabilities.max_loras == slots
        assert set(capabilities.target_modules) == (set(ALL_LINEAR) if slots else set())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "r": 2},
        {"use_dora": True},
        {"target_modules": ["k_proj", "down_proj"], "layers_to_transform": [1]},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 3}},
    ],
    ids=str,
)
async def test_merged_weights_answer_as_peft_does_and_the_base_comes_back(
    slotted: VllmEngine,
    model_dir: Path,
    reference: LlamaForCausalLM,
    save: Saver,
    settings: dict[str, Any],
) -> None:
    """faults.md 15, miles#1087: exactly back, as the next merge begins with the same base."""
    path = save(**settings)
    before = await slotted.score(None, IDS)
    report = await merge(slotted, path, model_dir)
    file = path / "adapter_model.safetensors"
    assert report.digest == blake3(file.read_bytes()).hexdigest()
    factors = sum("lora_A" in name for name in load_file(file))
    assert report.bound_modules == factors
    served = torch.tensor(await slotted.score(None, IDS))
    expected = reference_scores(reference, path)
    torch.testing.assert_close(served, expected, atol=1e-3, rtol=0)
    assert (expected - reference_scores(reference, None)).abs().max() > 0.1
    await merge(slotted, None, model_dir)
    assert await slotted.score(None, IDS) == before


async def test_a_slot_and_merged_weights_answer_alike(
    slotted: VllmEngine, model_dir: Path, save: Saver
) -> None:
    """One engine does both in turn, without a restart."""
    path = save(r=RANK)
    (loaded,) = await slotted.load(EngineAdapter(900, "merged-twin", path))
    assert (loaded.error, loaded.bound_modules) == ("", LAYERS * len(WIDTHS))
    in_slot = await slotted.score(EngineAdapter(900, "merged-twin", path), IDS)
    await slotted.unload(900)
    await merge(slotted, path, model_dir)
    merged = await slotted.score(None, IDS)
    torch.testing.assert_close(torch.tensor(merged), torch.tensor(in_slot), atol=1e-4, rtol=0)


@pytest.mark.timeout(300)
async def test_a_thousand_merges_leave_what_one_does(
    slotless: VllmEngine, model_dir: Path, save: Saver
) -> None:
    """faults.md 16, TRL#6688: whichever modules each of them touches; and the base comes back.

    faults.md 27, AReaL#1385: nothing of a merge is kept.
    """
    base = await slotless.score(None, IDS)
    last = save(seed=1, use_dora=True, target_modules=["v_proj", "gate_proj"])
    await merge(slotless, last, model_dir)
    once = await slotless.score(None, IDS)
    assert once != base
    others = [
        save(seed=2, target_modules=["q_proj", "o_proj"]),
        save(seed=3),
        save(seed=4, layers_to_transform=[0]),
    ]
    for number in range(MERGES - 1):
        await merge(slotless, others[number % len(others)], model_dir)
        if number == MERGES // 2:
            memory_mib = resident_mib()
    await merge(slotless, last, model_dir)
    assert await slotless.score(None, IDS) == once
    # The weights of a merge are more than 1 MiB.
    assert resident_mib() - memory_mib < MERGES // 10
    await merge(slotless, None, model_dir)
    assert await slotless.score(None, IDS) == base


async def test_a_whole_reload_ends_a_merge(
    slotless: VllmEngine, model_dir: Path, save: Saver
) -> None:
    """faults.md 11, vllm#31104: other weights, then an adapter on those, equal both from disk."""
    first, second = save(seed=5), save(seed=6, target_modules=["o_proj"])
    await merge(slotless, second, model_dir)
    expected = await slotless.score(None, IDS)
    await merge(slotless, first, model_dir)
    await slotless.load_weights(model_dir)
    await merge(slotless, second, model_dir)
    assert await slotless.score(None, IDS) == expected
    await merge(slotless, None, model_dir)


async def test_the_base_may_be_sharded(
    slotless: VllmEngine, model_dir: Path, save: Saver, tmp_path: Path
) -> None:
    weights = load_file(model_dir / "model.safetensors")
    shards = tmp_path / "shards"
    shards.mkdir()
    places = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(weights)}
    for file in set(places.values()):
        save_file({n: weights[n] for n, place in places.items() if place == file}, shards / file)
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    path = save(seed=7)
    await merge(slotless, path, model_dir)
    expected = await slotless.score(None, IDS)
    for put_back in (lambda: merge(slotless, None, shards), lambda: slotless.load_weights(shards)):
        await put_back()
        await merge(slotless, path, shards)
        assert await slotless.score(None, IDS) == expected
    await merge(slotless, None, model_dir)


def change(path: Path, tensors: dict[str, Tensor | None]) -> Path:
    file = path / "adapter_model.safetensors"
    changed: dict[str, Tensor | None] = {**load_file(file), **tensors}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, file)
    return path


LAYER = "base_model.model.model.layers.{}"
UP_A, UP_B = (f"{LAYER.format(0)}.mlp.up_proj.lora_{factor}.weight" for factor in "AB")
FAR_A, FAR_B = (f"{LAYER.format(9)}.mlp.up_proj.lora_{factor}.weight" for factor in "AB")
EMBED_A = "base_model.model.model.embed_tokens.lora_A.weight"
NORM_B = "base_model.model.model.norm.lora_B.weight"


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({UP_B: None}, [(UP_A, MismatchReason.KIND)]),
        ({UP_A: torch.zeros(4, HIDDEN + 1)}, [(UP_A, MismatchReason.SHAPE)]),
        (
            {FAR_A: torch.zeros(4, HIDDEN), FAR_B: torch.zeros(HIDDEN, 4)},
            [(FAR_A, MismatchReason.NO_MODULE), (FAR_B, MismatchReason.NO_MODULE)],
        ),
        ({EMBED_A: torch.zeros(4, HIDDEN)}, [(EMBED_A, MismatchReason.NOT_ADAPTED)]),
        ({NORM_B: torch.zeros(4, 1)}, [(NORM_B, MismatchReason.NOT_ADAPTED)]),
        ({"stranger": torch.zeros(1)}, [("stranger", MismatchReason.KIND)]),
    ],
)
async def test_what_has_no_place_is_named_and_changes_nothing(
    slotless: VllmEngine,
    model_dir: Path,
    save: Saver,
    tensors: dict[str, Tensor | None],
    expected: list[tuple[str, MismatchReason]],
) -> None:
    """faults.md 8, vllm#55193."""
    before = await slotless.score(None, IDS)
    path = change(save(seed=8), tensors)
    (report,) = await slotless.check_merge(path, base=model_dir)
    assert report.mismatches == tuple(Mismatch(name, reason) for name, reason in expected)
    assert [m.reason for m in report.mismatches] == [reason for _, reason in expected]
    assert report.error == ""
    assert await slotless.score(None, IDS) == before


async def test_a_merge_that_failed_is_mended_by_the_next(
    slotless: VllmEngine, model_dir: Path, save: Saver, tmp_path: Path
) -> None:
    """faults.md 22, AReaL#1160: in the middle, when some linears have taken theirs."""
    before = await slotless.score(None, IDS)
    weights = load_file(model_dir / "model.safetensors")
    name = f"model.layers.{LAYERS - 1}.mlp.down_proj.weight"
    broken = tmp_path / "broken"
    broken.mkdir()
    save_file(weights | {name: torch.zeros(3, 3)}, broken / "model.safetensors")
    half = save(seed=9, target_modules=["gate_proj"])
    # The base's weights of what the next one no longer touches do not fit.
    await merge(slotless, save(seed=10), model_dir)
    (report,) = await slotless.merge(half, base=broken)
    assert report.error
    await merge(slotless, half, model_dir)
    found = await slotless.score(None, IDS)
    await merge(slotless, None, model_dir)
    assert await slotless.score(None, IDS) == before
    await merge(slotless, half, model_dir)
    assert await slotless.score(None, IDS) == found
    await merge(slotless, None, model_dir)
