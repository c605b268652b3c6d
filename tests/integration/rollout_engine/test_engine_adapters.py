"""Adapters in a real engine: each request is answered by its own, whatever else arrives."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from common.adapter import Canary, CanarySequence, Dtype
from common.errors import CanaryRefused, Incompatible
from rollout_svc.generation.sampling import Sampling
from rollout_svc.versions.canary import check_canary
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.versions.selector import Rule, Selector
from rollout_svc.vllm_engine.engine import VllmEngine
from tests.integration.rollout_engine.tiny import (
    GREEDY,
    LAYERS,
    PROMPT,
    VOCAB,
    WIDTHS,
    AdapterMaker,
    expected_logprobs,
    logprobs,
    sample,
    tokens,
)
from tests.live import admit

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(180)]

TRAINER = "trainer:50051"


async def test_a_committed_adapter_answers_and_the_base_stays_itself(
    engine: VllmEngine,
    registry: AdapterRegistry,
    adapters: AdapterMaker,
    reference: LlamaForCausalLM,
) -> None:
    """faults.md 1: the served log-probabilities are the adapter's and differ from the base's."""
    content, path = adapters.make(seed=1)
    before = await sample(engine, None)
    committed = await registry.commit(content, path, source=TRAINER)
    assert [report.bound_modules for report in committed.reports] == [LAYERS * len(WIDTHS)]
    async with admit(registry, Selector(Rule.LATEST, "default"), wait_seconds=1) as live:
        served = await sample(engine, live)
    expected = expected_logprobs(reference, path, PROMPT, tokens(served))
    torch.testing.assert_close(torch.tensor(logprobs(served)), expected, atol=1e-3, rtol=0)
    base = expected_logprobs(reference, None, PROMPT, tokens(served))
    assert (expected - base).abs().max() > 0.1
    after = await sample(engine, None)
    assert (tokens(after), logprobs(after)) == (tokens(before), logprobs(before))


async def test_new_versions_leave_a_running_generation_alone(
    engine: VllmEngine, registry: AdapterRegistry, adapters: AdapterMaker
) -> None:
    """faults.md 20: a long generation on v1, while v2 and v3 arrive, ends as if they had not."""
    versions = [adapters.make(seed=seed) for seed in (1, 2, 3)]
    await registry.commit(*versions[0], source=TRAINER)
    long = replace(GREEDY, max_tokens=400)
    async with admit(registry, Selector(Rule.LATEST, "default"), wait_seconds=1) as live:
        undisturbed = await sample(engine, live, sampling=long)
        running = asyncio.create_task(sample(engine, live, sampling=long))
        await registry.commit(*versions[1], source=TRAINER)
        await registry.commit(*versions[2], source=TRAINER)
        assert not running.done()
        disturbed = await running
    assert tokens(disturbed) == tokens(undisturbed)
    assert logprobs(disturbed) == logprobs(undisturbed)
    assert registry.listing() == [versions[1][0].ref, versions[2][0].ref]


async def test_a_mixed_batch_answers_each_request_with_its_own_weights(
    engine: VllmEngine,
    registry: AdapterRegistry,
    adapters: AdapterMaker,
    reference: LlamaForCausalLM,
) -> None:
    """Base, v1 and v3 in one batch while every slot is taken: vLLM's own CPU arithmetic answers
    the base request with the last slot's adapter, and a vLLM that changed would do so again."""
    versions = [adapters.make(seed=seed) for seed in (1, 2, 3)]
    latest = Selector(Rule.LATEST, "default")
    await registry.commit(*versions[0], source=TRAINER)
    async with admit(registry, latest, wait_seconds=1) as first:
        await registry.commit(*versions[1], source=TRAINER)
        await registry.commit(*versions[2], source=TRAINER)
        async with admit(registry, latest, wait_seconds=1) as third:
            answers = await asyncio.gather(
                *(sample(engine, live, cache_salt="mixed") for live in (None, first, third))
            )
    for answer, path in zip(answers, (None, versions[0][1], versions[2][1]), strict=True):
        expected = expected_logprobs(reference, path, PROMPT, tokens(answer))
        torch.testing.assert_close(torch.tensor(logprobs(answer)), expected, atol=1e-3, rtol=0)


async def test_a_prompt_of_several_blocks_is_not_read_from_another_versions_cache(
    engine: VllmEngine,
    registry: AdapterRegistry,
    adapters: AdapterMaker,
    reference: LlamaForCausalLM,
) -> None:
    """faults.md 19: after v1 has cached the prompt, v2 gives exactly what a cold v2 gives."""
    prompt = tuple((7 * position) % VOCAB for position in range(200))
    first, second = adapters.make(seed=1), adapters.make(seed=2)
    await registry.commit(*first, source=TRAINER)
    await registry.commit(*second, source=TRAINER)
    latest, exact = Selector(Rule.LATEST, "default"), Selector(Rule.EXACT, "default", 1)
    async with admit(registry, exact, wait_seconds=1) as live:
        await sample(engine, live, prompt=prompt)
    async with admit(registry, latest, wait_seconds=1) as live:
        after_first = await sample(engine, live, prompt=prompt)
        cold = await sample(engine, live, prompt=prompt, cache_salt="never used before")
    assert (tokens(after_first), logprobs(after_first)) == (tokens(cold), logprobs(cold))
    expected = expected_logprobs(reference, second[1], prompt, tokens(cold))
    torch.testing.assert_close(torch.tensor(logprobs(cold)), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"layers": (7,)}, "the model has no such module"),
        ({"layers": (1, 2)}, "14 tensors found no module: .*layers.2"),
        ({"narrower": 2}, "64 in_features, the module has 128"),
    ],
)
async def test_an_adapter_that_binds_to_nothing_is_refused_by_name(
    engine: VllmEngine,
    registry: AdapterRegistry,
    adapters: AdapterMaker,
    wrong: dict[str, object],
    reason: str,
) -> None:
    """faults.md 8 and 26: refused, naming the tensors; no listing changes and no slot leaks."""
    content, path = adapters.make(seed=1)
    await registry.commit(content, path, source=TRAINER)
    bad, bad_path = adapters.make(seed=2, **wrong)  # type: ignore[arg-type]
    with pytest.raises(Incompatible, match=reason):
        await registry.commit(bad, bad_path, source=TRAINER)
    assert registry.listing() == [content.ref]
    assert not bad_path.exists()
    assert list(await engine.llm.list_loras()) == [live.loaded.id for live in registry.versions.all]


async def test_served_logprobs_are_of_the_distribution_sampled_from(
    engine: VllmEngine,
    registry: AdapterRegistry,
    adapters: AdapterMaker,
    reference: LlamaForCausalLM,
) -> None:
    """faults.md 18: at temperature 0.7 they are the log-softmax of logits / 0.7."""
    content, path = adapters.make(seed=4)
    await registry.commit(content, path, source=TRAINER)
    sampling = Sampling(n=1, max_tokens=64, temperature=0.7, seed=11, ignore_eos=True)
    async with admit(registry, Selector(Rule.LATEST, "default"), wait_seconds=1) as live:
        served = await sample(engine, live, sampling=sampling)
    expected = expected_logprobs(reference, path, PROMPT, tokens(served), temperature=0.7)
    torch.testing.assert_close(torch.tensor(logprobs(served)), expected, atol=1e-3, rtol=0)


async def test_the_served_change_is_linear_in_alpha(
    engine: VllmEngine, registry: AdapterRegistry, adapters: AdapterMaker
) -> None:
    """faults.md 14: twice alpha is what twice B is, exactly, and not what alpha is."""
    answers = []
    for alpha, b_factor in ((32.0, 1.0), (16.0, 2.0), (16.0, 1.0)):
        content, path = adapters.make(seed=5, alpha=alpha, b_factor=b_factor)
        await registry.commit(content, path, source=TRAINER)
        exact = Selector(Rule.EXACT, "default", content.ref.version)
        async with admit(registry, exact, wait_seconds=1) as live:
            answers.append(logprobs(await sample(engine, live)))
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


async def test_every_dtype_on_the_wire_gives_the_same_answer(
    engine: VllmEngine, registry: AdapterRegistry, adapters: AdapterMaker
) -> None:
    """faults.md 17: values that all dtypes hold exactly are served alike from each."""
    answers = []
    for dtype in Dtype:
        content, path = adapters.make(seed=6, dtype=dtype)
        await registry.commit(content, path, source=TRAINER)
        async with admit(registry, Selector(Rule.LATEST, "default"), wait_seconds=1) as live:
            answers.append(logprobs(await sample(engine, live)))
    assert answers[0] == answers[1] == answers[2]


async def test_the_staged_file_is_neither_written_nor_needed_by_a_loaded_adapter(
    engine: VllmEngine, registry: AdapterRegistry, adapters: AdapterMaker
) -> None:
    """faults.md 21: overwriting the received bytes after the commit changes no answer."""
    content, path = adapters.make(seed=7)
    weights = path / "adapter_model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).digest()
    await registry.commit(content, path, source=TRAINER)
    assert hashlib.sha256(weights.read_bytes()).digest() == digest
    async with admit(registry, Selector(Rule.LATEST, "default"), wait_seconds=1) as live:
        before = logprobs(await sample(engine, live))
        with weights.open("r+b") as file:
            file.write(bytes(weights.stat().st_size))
        assert logprobs(await sample(engine, live)) == before


async def test_scores_are_of_the_named_weights(
    engine: VllmEngine,
    registry: AdapterRegistry,
    adapters: AdapterMaker,
    reference: LlamaForCausalLM,
) -> None:
    """faults.md 1: the adapter's own, not the base's, though each has cached the tokens."""
    content, path = adapters.make(seed=8)
    await registry.commit(content, path, source=TRAINER)
    async with admit(registry, Selector(Rule.LATEST, "default"), wait_seconds=1) as live:
        assert live is not None
        served = await sample(engine, live)
        sequence = PROMPT + tokens(served)
        await sample(engine, None, prompt=sequence)
        scored, base = [
            torch.tensor(await engine.score(adapter, sequence)) for adapter in (live.loaded, None)
        ]
    for scores, weights in ((scored, path), (base, None)):
        expected = expected_logprobs(reference, weights, sequence[:1], sequence[1:])
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=0)
    own = torch.tensor(logprobs(served))
    torch.testing.assert_close(scored[len(PROMPT) - 1 :], own, atol=1e-4, rtol=0)
    assert (scored - base).abs().mean() > 1e-3


async def test_a_version_is_scored_while_others_generate(
    engine: VllmEngine,
    registry: AdapterRegistry,
    adapters: AdapterMaker,
    reference: LlamaForCausalLM,
) -> None:
    """The scored prompt's rows are not those of the batch that runs."""
    content, path = adapters.make(seed=10)
    await registry.commit(content, path, source=TRAINER)
    async with admit(registry, Selector(Rule.LATEST, "default"), wait_seconds=1) as live:
        assert live is not None
        sampling = replace(GREEDY, max_tokens=48)
        running = [
            asyncio.ensure_future(sample(engine, who, sampling=sampling))
            for who in (live, None) * 4
        ]
        scored = [await engine.score(live.loaded, ids) for ids in (PROMPT, PROMPT[::-1]) * 3]
        answers = await asyncio.gather(*running)
    for scores, ids in zip(scored, (PROMPT, PROMPT[::-1]) * 3, strict=True):
        expected = expected_logprobs(reference, path, ids[:1], ids[1:])
        torch.testing.assert_close(torch.tensor(scores), expected, atol=1e-4, rtol=0)
    assert {len(tokens(answer)) for answer in answers} == {48}


async def test_a_canary_lets_its_own_version_in_and_no_other(
    engine: VllmEngine,
    registry: AdapterRegistry,
    adapters: AdapterMaker,
    reference: LlamaForCausalLM,
) -> None:
    """faults.md 1: weights that answer as the base does are not taken for the version."""
    content, path = adapters.make(seed=9)
    await registry.commit(content, path, source=TRAINER)
    async with admit(registry, Selector(Rule.LATEST, "default"), wait_seconds=1) as live:
        assert live is not None
        right, wrong = [
            Canary(
                tuple(
                    CanarySequence(
                        ids,
                        tuple(expected_logprobs(reference, weights, ids[:1], ids[1:]).tolist()),
                    )
                    for ids in (PROMPT, PROMPT[::-1])
                ),
                max_difference=1e-3,
            )
            for weights in (path, None)
        ]
        assert await check_canary(engine, live.loaded, right, ref=content.ref) < 1e-4
        with pytest.raises(CanaryRefused, match="in the mean, at most"):
            await check_canary(engine, live.loaded, wrong, ref=content.ref)
