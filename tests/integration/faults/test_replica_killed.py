"""Replicas killed at random moments, while prompts are sampled from the fleet."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from refit.v1 import rollout_pb2

from common.tasks import cancel
from tests.eventually import eventually
from tests.integration.faults.processes import SECONDS, Processes, ReplicaProcess, staged
from tests.integration.faults.run import Run, called, running
from tests.proxy import Proxy
from trainer_svc.rl.sampler import Answer, Sampler

pytestmark = pytest.mark.timeout(150)
KILLS = 20
GROUP = 2
TOKENS = 12
_SLOW = 4e6
_LOAD_SECONDS = 0.5
_TOKEN_SECONDS = 0.02


@dataclass(slots=True)
class Prompts:
    """Groups that are asked for all the while, four at a time; every prompt is another."""

    sampler: Sampler
    answers: dict[int, Answer] = field(default_factory=dict)
    asked: int = 0
    _stopped: bool = False

    async def ask(self) -> None:
        while not self._stopped:
            self.asked += 1
            number = self.asked
            answer = await self.sampler.group(
                _prompt(number), request_id=f"p{number}", version=1, timeout_seconds=SECONDS
            )
            assert number not in self.answers
            self.answers[number] = answer

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[Prompts]:
        tasks = [asyncio.ensure_future(self.ask()) for _ in range(4)]
        try:
            yield self
            self._stopped = True
            await asyncio.wait_for(asyncio.gather(*tasks), SECONDS)
        finally:
            await cancel(*tasks)

    def check(self) -> None:
        """Every sample is there once, whole, and that of its prompt."""
        assert sorted(self.answers) == list(range(1, self.asked + 1))
        for number, answer in self.answers.items():
            ids = itertools.cycle(_prompt(number))
            echo = [next(ids) for _ in range(TOKENS + GROUP)]
            expected = [echo[index : index + TOKENS] for index in range(GROUP)]
            assert [completion.token_ids for completion in answer.completions] == expected


def _prompt(number: int) -> list[int]:
    return [1 + number // 90, 1 + number % 90, 99]


@dataclass(slots=True)
class Victims:
    """A replica to kill behind a cable of its own; the next one starts meanwhile."""

    processes: Processes
    run: Run
    proxy: Proxy
    _next: asyncio.Task[ReplicaProcess] | None = None

    async def take(self) -> ReplicaProcess:
        """One that is READY."""
        self.proxy.bytes_per_second = None
        victim = await (self._next or self._start())
        await self.run.ready(victim)
        return victim

    def start_next(self) -> None:
        self._next = asyncio.ensure_future(self._start())

    def _start(self) -> Awaitable[ReplicaProcess]:
        return self.processes.replica(
            self.proxy.address,
            f"engine.token_seconds={_TOKEN_SECONDS}",
            f"engine.load_seconds={_LOAD_SECONDS}",
        )


Kill = Callable[[Run, ReplicaProcess, Proxy, random.Random], Awaitable[None]]


async def during_receive(
    run: Run, victim: ReplicaProcess, proxy: Proxy, chance: random.Random
) -> None:
    """With some of the bytes, never all."""
    proxy.bytes_per_second = _SLOW
    begun_bytes = proxy.passed_bytes
    ref = run.publish()
    half_bytes = chance.uniform(0.05, 0.8) * (2 << 20)
    await eventually(lambda: proxy.passed_bytes - begun_bytes > half_bytes, seconds=SECONDS)
    assert not any(ref.digest.hex()[:16] in line for line in victim.lines)


async def during_commit(
    run: Run, victim: ReplicaProcess, proxy: Proxy, chance: random.Random
) -> None:
    """While the engine loads what was received whole."""
    ref = run.publish()
    await victim.said(f"loading default@{ref.version}-")
    await asyncio.sleep(chance.uniform(0, 0.5) * _LOAD_SECONDS)
    member = run.member(victim)
    assert member is not None and member.newest("default") == ref.version - 1


async def during_generation(
    run: Run, victim: ReplicaProcess, proxy: Proxy, chance: random.Random
) -> None:
    """With prompts out that it has begun to answer, and a version on its way."""
    run.publish()
    await asyncio.sleep(chance.uniform(0, TOKENS * _TOKEN_SECONDS))

    def busy() -> bool:
        member = run.member(victim)
        return member is not None and member.outstanding > 0

    await eventually(busy, seconds=SECONDS)


@pytest.mark.parametrize("moment", [during_receive, during_commit, during_generation])
async def test_a_killed_replica_loses_no_sample_and_halves_no_version(
    moment: Kill, processes: Processes
) -> None:
    """faults.md 23, 24 and 25, TRL#6797, SkyRL#2035, prime-rl#2391."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with running(processes) as run, Proxy(run.address) as proxy:
        run.publish()
        survivor = await processes.replica(run.address, f"engine.token_seconds={_TOKEN_SECONDS}")
        await run.ready(survivor)
        victims = Victims(processes, run, proxy)
        sampler = _sampler(run)
        async with called(survivor, run.refs.values()), Prompts(sampler).going_on() as prompts:
            for _ in range(KILLS):
                victim = await victims.take()
                victims.start_next()
                await moment(run, victim, proxy, chance)
                await victim.kill()
                await run.left(victim, "its subscription ended")
                await run.ready(survivor)
            last = await victims.take()
        prompts.check()
        await _nothing_is_left(processes, run, survivor, last)


def _sampler(run: Run) -> Sampler:
    params = rollout_pb2.SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    return Sampler(
        run.node.fleet,
        run_id=run.newest.run_id,
        adapter="default",
        params=params,
        group_size=GROUP,
        published=run.refs,
    )


async def _nothing_is_left(
    processes: Processes, run: Run, survivor: ReplicaProcess, last: ReplicaProcess
) -> None:
    """Only versions that were published, and of the dead no folder once another replica starts."""
    fresh = await processes.replica(run.address)
    await run.ready(fresh)
    refs = list(run.refs.values())
    assert await survivor.listing() == refs[-2:]
    assert (await last.listing())[-1:] == (await fresh.listing())[-1:] == refs[-1:]
    counts = sorted([len(await replica.listing()) for replica in (survivor, last, fresh)])
    await eventually(lambda: staged(processes.staging) == counts, seconds=SECONDS)
