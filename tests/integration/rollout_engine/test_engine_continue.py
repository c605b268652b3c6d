"""Swap rule `continue` on a real engine: who made which token."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial

import pytest
import torch
from refit.v1 import rollout_pb2
from transformers import LlamaForCausalLM

from common.adapter import AdapterRef
from common.rules import Rules, Swap
from common.stream.content import Content
from common.tasks import cancel
from rollout_svc.engine import Generation
from rollout_svc.generation.generator import Generator
from rollout_svc.generation.requests import RunningRequests
from rollout_svc.generation.sampling import Sampling
from rollout_svc.metrics import Metrics
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.versions.selector import Rule, Selector
from rollout_svc.vllm_engine.engine import VllmEngine
from tests.eventually import eventually
from tests.generating import LATEST, request
from tests.integration.rollout_engine.openai_client import Endpoint
from tests.integration.rollout_engine.tiny import PROMPT, AdapterMaker, expected_logprobs

pytestmark = pytest.mark.asyncio(loop_scope="package")
TRAINER = "trainer:50051"
TOKENS = 400


def made_by_newest(runs: list[list[AdapterRef | None]], newest: AdapterRef) -> list[int]:
    return [made_by.count(newest) for made_by in runs]


def continuing(content: Content) -> Content:
    return Content.whole(
        content.ref, content.manifest, content.buffer, rules=Rules(swap=Swap.CONTINUE)
    )


async def test_running_requests_go_on_and_each_token_says_who_made_it(
    engine: VllmEngine, registry: AdapterRegistry, adapters: AdapterMaker
) -> None:
    """Three completions of one request, so that each has spans of its own."""
    versions = [adapters.make(seed=version) for version in (1, 2, 3)]
    await registry.commit(*versions[0], source=TRAINER)
    counts = [0, 0, 0]
    runs: list[list[AdapterRef | None]] = [[], [], []]
    swapped = asyncio.Event()

    async def follow() -> None:
        latest = Selector(Rule.LATEST, "default")
        async with registry.admit(latest, request_id="long", wait_seconds=5) as admitted:
            generation = Generation(
                request_id="long",
                prompt_token_ids=PROMPT,
                sampling=Sampling(n=3, max_tokens=TOKENS, ignore_eos=True, seed=1),
                adapter=admitted.adapter,
                cache_salt=admitted.cache_salt,
            )
            async with aclosing(engine.generate(generation)) as deltas:
                async for delta in deltas:
                    assert admitted.goes_on()
                    kept, made_by = await admitted.attribute(delta)
                    counts[kept.index] += len(kept.token_ids)
                    runs[kept.index] += [made_by] * len(kept.token_ids)
                    if min(counts) > 20:
                        swapped.set()

    following = asyncio.create_task(follow())
    async with asyncio.timeout(20):
        await swapped.wait()
    for content, path in versions[1:]:
        await registry.commit(continuing(content), path, source=TRAINER)
        await eventually(lambda: min(made_by_newest(runs, registry.listing()[-1])) >= 20)
    await following

    refs = [content.ref for content, _ in versions]
    assert counts == [TOKENS] * 3
    for made_by in runs:
        assert made_by == sorted(made_by, key=lambda ref: ref.version if ref else 0)
        assert {ref for ref in made_by} == set(refs)
    assert registry.listing() == refs[2:]
    assert registry.lora_slots.used == 1


async def test_what_the_engine_has_not_begun_is_made_by_the_new_version_alone(
    engine: VllmEngine,
    registry: AdapterRegistry,
    adapters: AdapterMaker,
    endpoint: Endpoint,
    reference: LlamaForCausalLM,
) -> None:
    """faults.md 19, vllm#42125: blocks of the old weights, found by a request that waited."""
    (old, old_path), (new, new_path) = (adapters.make(seed=version) for version in (1, 2))
    await registry.commit(old, old_path, source=TRAINER)
    prompt = list(range(5, 105))
    await endpoint.complete("default", prompt=prompt)
    requests = RunningRequests(engine.abort, max_requests=4)
    asked = partial(request, adapter=LATEST, ignore_eos=True, max_tokens=24, temperature=0.0)
    generator = Generator(engine, registry, requests, Metrics())
    long = asyncio.create_task(
        answer_of(generator, asked(ids=PROMPT, n=8, max_tokens=TOKENS, temperature=1.0))
    )
    await eventually(lambda: len(registry.uses) == 1)
    queued = asyncio.create_task(answer_of(generator, asked(ids=tuple(prompt))))
    over_http = asyncio.create_task(endpoint.complete("default", prompt=prompt))
    await eventually(lambda: engine.llm.get_num_unfinished_requests() >= 10)
    await registry.commit(continuing(new), new_path, source=TRAINER)
    assert not long.done() and not queued.done()

    messages, completion = await queued, await over_http
    choice = completion.choices[0]
    found = {
        "OpenAI": (choice.token_ids, choice.logprobs.token_logprobs),
        "Generate": (
            [token for message in messages for token in message.token_ids],
            [value for message in messages for value in message.logprobs],
        ),
    }
    assert completion.model == "default@2"
    assert {message.adapter.version for message in messages} == {2}
    for ids, logprobs in found.values():
        expected = expected_logprobs(reference, new_path, tuple(prompt), tuple(ids))
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=2e-4, rtol=0)
    await cancel(long)


async def answer_of(
    generator: Generator, asked: rollout_pb2.GenerateRequest
) -> list[rollout_pb2.GenerateResponse]:
    async with aclosing(generator.answer(asked, wait_seconds=20)) as messages:
        return [message async for message in messages]
