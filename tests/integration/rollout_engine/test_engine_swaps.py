"""Many swaps on a real engine: what comes after them is as on a replica that has seen none."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM

from common.adapter import AdapterRef
from common.errors import QueueFull
from common.rules import Rules, Swap
from common.stream.content import Content
from rollout_svc.config import RolloutConfig
from rollout_svc.engine import EngineAdapter, Generation, TokenDelta
from rollout_svc.generation.sampling import Sampling
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.versions.selector import Rule, Selector
from rollout_svc.vllm_engine.engine import VllmEngine
from tests.eventually import eventually
from tests.integration.rollout_engine.tiny import (
    PROMPT,
    RANK,
    VOCAB,
    AdapterMaker,
    expected_logprobs,
    request_ids,
)

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(180)]

TRAINER = "trainer:50051"
LATEST = Selector(Rule.LATEST, "default")
LONG_PROMPT = tuple((7 * position) % VOCAB for position in range(100))
"""Three cache blocks and a part of one."""


@dataclass(slots=True)
class Answer:
    """What came of one request, and which version made each token."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    refs: list[AdapterRef | None] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, delta: TokenDelta, ref: AdapterRef | None) -> None:
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs
        self.refs += [ref] * len(delta.token_ids)
        self.begun.set()

    def begins_as(self, expected: Answer, *, count: int) -> None:
        """The first tokens agree, and their log-probabilities."""
        assert self.tokens[:count] == expected.tokens[:count]
        assert self.logprobs[:count] == pytest.approx(expected.logprobs[:count], abs=1e-5)


async def ask(
    registry: AdapterRegistry,
    selector: Selector = LATEST,
    *,
    max_tokens: int,
    prompt: tuple[int, ...] = LONG_PROMPT,
    into: Answer | None = None,
    wait_seconds: float = 20.0,
) -> Answer:
    """Greedily, and as the service does it."""
    answer, request_id = into or Answer(), next(request_ids)
    async with registry.admit(
        selector, request_id=request_id, wait_seconds=wait_seconds
    ) as admitted:
        generation = Generation(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=Sampling(n=1, max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            adapter=admitted.adapter,
            cache_salt=admitted.cache_salt,
        )
        async with aclosing(registry.engine.generate(generation)) as deltas:
            async for delta in deltas:
                assert admitted.goes_on()
                answer.take(*await admitted.attribute(delta))
    return answer


async def answer_alone(engine: VllmEngine, path: Path, *, number: int) -> Answer:
    """Of an engine with this adapter and no other, none of whose names it has heard before."""
    adapter, answer = EngineAdapter(number, f"alone-{number}", path), Answer()
    await engine.load(adapter)
    generation = Generation(
        request_id=next(request_ids),
        prompt_token_ids=LONG_PROMPT,
        sampling=Sampling(n=1, max_tokens=8, temperature=0.0, ignore_eos=True),
        adapter=adapter,
        cache_salt=adapter.name,
    )
    async with aclosing(engine.generate(generation)) as deltas:
        async for delta in deltas:
            answer.take(delta, None)
    await engine.unload(number)
    return answer


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def cold(config: RolloutConfig) -> AsyncIterator[VllmEngine]:
    """An engine beside the other, without a registry."""
    engine = await VllmEngine.start(config)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def numbers() -> itertools.count[int]:
    return itertools.count(1)


@pytest.mark.parametrize("swap", Swap)
async def test_after_each_of_fifty_swaps_a_version_answers_as_on_a_cold_replica(
    registry: AdapterRegistry,
    cold: VllmEngine,
    adapters: AdapterMaker,
    numbers: itertools.count[int],
    swap: Swap,
) -> None:
    """faults.md 19 and 20, vllm#42125: though the same bytes have been here before and left blocks
    of the prompt in the cache, and a request of the version before is decoding."""
    made = [adapters.make(seed=seed) for seed in range(5)]
    alone = [await answer_alone(cold, path, number=next(numbers)) for _, path in made]
    await registry.commit(*made[0], source=TRAINER)
    old = made[0][0].ref
    for seed in itertools.islice(itertools.cycle(range(5)), 1, 51):
        content, path = adapters.make(seed=seed)
        interrupted = Answer()
        running = asyncio.create_task(ask(registry, max_tokens=8, into=interrupted))
        await interrupted.begun.wait()
        await registry.commit(ruled(content, swap), path, source=TRAINER)
        answer = await ask(registry, max_tokens=4)
        assert answer.refs == [content.ref] * 4
        answer.begins_as(alone[seed], count=4)

        await running
        count = interrupted.refs.count(old)
        interrupted.begins_as(alone[(seed - 1) % 5], count=count)
        others = [content.ref] * (len(interrupted.refs) - count)
        assert interrupted.refs == [old] * count + others
        assert len(interrupted.tokens) == 8 or swap is Swap.ABORT
        assert not others or swap is Swap.CONTINUE
        old = content.ref


def ruled(content: Content, swap: Swap) -> Content:
    rules = Rules(swap=swap)
    return Content.whole(content.ref, content.manifest, content.buffer, rules=rules)


async def test_nothing_adds_up_over_five_hundred_versions(
    engine: VllmEngine, registry: AdapterRegistry, adapters: AdapterMaker, tmp_path: Path
) -> None:
    """faults.md 27, AReaL#1385, vllm#42207: memory, slots, files and file handles level off."""
    for number in range(500):
        content, path = adapters.make(seed=number)
        await registry.commit(content, path, source=TRAINER)
        answer = await ask(registry, max_tokens=1, prompt=PROMPT)
        assert answer.refs == [content.ref]
        if number == 100:
            early = usage()
    late = usage()
    assert registry.listing() == [registry.listing()[0], content.ref]
    await eventually(lambda: len(list((tmp_path / "adapters").iterdir())) == 2, seconds=10)
    assert len(await engine.llm.list_loras()) == 2
    assert late.keys() == early.keys()
    for process, (memory_bytes, handles) in late.items():
        # An eighth of what 400 versions weigh.
        assert memory_bytes - early[process][0] < 50 * len(content.buffer)
        assert handles <= early[process][1] + 2


def usage() -> dict[int, tuple[int, int]]:
    """Resident bytes and open handles of this process and of each of the engine's."""
    gc.collect()
    this = psutil.Process()
    return {
        process.pid: (process.memory_info().rss, process.num_fds())
        for process in (this, *this.children(recursive=True))
    }


async def test_more_adapters_than_slots_of_mixed_ranks_answer_each_with_its_own_weights(
    registry: AdapterRegistry, adapters: AdapterMaker, reference: LlamaForCausalLM
) -> None:
    """Five adapters share two slots, all asked for at once and again: those that make room come
    back from their staged directories."""
    paths = {}
    for seed, rank in enumerate((RANK, 1, 4, RANK, 2)):
        content, path = adapters.make(seed=seed, adapter=f"adapter-{seed}", rank=rank)
        await registry.commit(content, path, source=TRAINER)
        paths[content.ref.adapter] = path
    names = [*paths, *paths, *reversed(paths)]
    answers = await asyncio.gather(
        *(
            ask(registry, Selector(Rule.LATEST, name), max_tokens=12, prompt=PROMPT)
            for name in names
        )
    )
    for name, answer in zip(names, answers, strict=True):
        assert {ref.adapter for ref in answer.refs if ref} == {name}
        expected = expected_logprobs(reference, paths[name], PROMPT, tuple(answer.tokens))
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-3, rtol=0)
    assert registry.lora_slots.used <= registry.lora_slots.count - 1


async def test_two_adapters_of_different_rank_by_turns_are_as_each_alone(
    registry: AdapterRegistry,
    cold: VllmEngine,
    adapters: AdapterMaker,
    numbers: itertools.count[int],
) -> None:
    alone = {}
    for seed, rank in enumerate((RANK, 2)):
        content, path = adapters.make(seed=seed, adapter=f"rank-{rank}", rank=rank)
        await registry.commit(content, path, source=TRAINER)
        alone[content.ref.adapter] = await answer_alone(cold, path, number=next(numbers))
    for name in [*alone] * 4:
        answer = await ask(registry, Selector(Rule.LATEST, name), max_tokens=8)
        answer.begins_as(alone[name], count=8)


async def test_what_a_request_uses_stays_whatever_is_asked_for_or_comes(
    registry: AdapterRegistry, adapters: AdapterMaker
) -> None:
    """faults.md 20 and 25, vllm#47724: with both slots in use, a request for an adapter that had to
    leave waits and is refused when its time is over; a commit takes the spare slot."""
    for seed, name in enumerate("cdab"):
        content, path = adapters.make(seed=seed, adapter=name)
        await registry.commit(content, path, source=TRAINER)
    undisturbed = [
        await ask(registry, Selector(Rule.LATEST, name), max_tokens=200) for name in "ab"
    ]
    begun = [Answer(), Answer()]
    running = [
        asyncio.create_task(ask(registry, Selector(Rule.LATEST, name), max_tokens=200, into=answer))
        for name, answer in zip("ab", begun, strict=True)
    ]
    for answer in begun:
        await answer.begun.wait()
    with pytest.raises(QueueFull, match="max_loras: running requests used all 2 slots"):
        await ask(registry, Selector(Rule.LATEST, "c"), max_tokens=1, wait_seconds=0.05)
    newer, path = adapters.make(seed=9, adapter="c")
    await registry.commit(newer, path, source=TRAINER)
    waiting = asyncio.create_task(ask(registry, Selector(Rule.LATEST, "c"), max_tokens=1))
    for task, expected in zip(running, undisturbed, strict=True):
        (await task).begins_as(expected, count=200)
    assert (await waiting).refs == [newer.ref]
