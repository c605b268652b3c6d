"""Swap rule `continue` on a real engine: who made which token."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from common.adapter import AdapterRef
from common.rules import Rules, Swap
from common.stream.content import Content
from rollout_svc.engine import Generation
from rollout_svc.generation.sampling import Sampling
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.versions.selector import Rule, Selector
from rollout_svc.vllm_engine.engine import VllmEngine
from tests.eventually import eventually
from tests.integration.rollout_engine.tiny import PROMPT, AdapterMaker

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
