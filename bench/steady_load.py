"""So many requests that decode all the time: as one ends, the next begins."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
from refit.v1 import rollout_pb2, rollout_pb2_grpc

from common.signal import Signal

log = logging.getLogger(__name__)

_DEADLINE_SECONDS = 120.0
_PROMPT_TOKENS = 20
_LATEST = rollout_pb2.AdapterSelector(adapter="default", rule=rollout_pb2.VERSION_RULE_LATEST)


@dataclass(frozen=True, slots=True)
class Arrival:
    """`tokens` of a request that came at `seconds`, so long after those before; None: the first."""

    seconds: float
    tokens: int
    gap_seconds: float | None


@dataclass(slots=True)
class SteadyLoad:
    """Run `keep_up` as a task; times are those of `time.perf_counter`.

    Args:
        max_tokens: of each request. What was aborted is handed back and goes on.
    """

    stub: rollout_pb2_grpc.RolloutServiceStub
    width: int
    max_tokens: int
    vocab_size: int
    arrivals: list[Arrival] = field(default_factory=list)
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    """Requests that ended in an error, or with fewer tokens than they should."""

    _begun: dict[int, float] = field(default_factory=dict)
    _changed: Signal = field(default_factory=Signal)

    async def keep_up(self) -> None:
        """Until cancelled, or more requests than run at a time have failed."""
        async with asyncio.TaskGroup() as group:
            for worker in range(self.width):
                group.create_task(self._work(worker))

    async def turnover(self) -> None:
        """Return once every request that runs has begun after this call."""
        since = time.perf_counter()
        everybody_began = await self._changed.wait_until(
            lambda: len(self._begun) == self.width and min(self._begun.values()) > since,
            timeout_seconds=2 * _DEADLINE_SECONDS,
        )
        assert everybody_began, "a request does not end"

    def within(self, begin: float, end: float) -> Iterator[Arrival]:
        """What came between two times."""
        return (arrival for arrival in self.arrivals if begin <= arrival.seconds < end)

    async def _work(self, worker: int) -> None:
        rng = random.Random(worker)
        # So that they do not all end at once.
        limit = self.max_tokens * (worker + 1) // self.width
        while True:
            self._begun[worker] = time.perf_counter()
            self._changed.notify()
            prompt = [rng.randrange(self.vocab_size) for _ in range(_PROMPT_TOKENS)]
            try:
                complete = await self._request(prompt, limit) == limit
            except grpc.aio.AioRpcError as error:
                log.error("%s: %s", error.code().name, error.details())
                complete = False
            self.finished += complete
            self.failed += not complete
            if self.failed > self.width:
                raise RuntimeError(f"{self.failed} requests failed")
            limit = self.max_tokens

    async def _request(self, prompt: list[int], limit: int) -> int:
        """How many tokens came, of all its parts."""
        tokens: list[int] = []
        before = None
        while True:
            reason = rollout_pb2.FINISH_REASON_UNSPECIFIED
            async for response in self.stub.Generate(
                rollout_pb2.GenerateRequest(
                    token_ids=rollout_pb2.TokenIds(ids=prompt),
                    prefix_token_ids=tokens,
                    sampling=rollout_pb2.SamplingParams(max_tokens=limit, ignore_eos=True),
                    adapter=_LATEST,
                ),
                timeout=_DEADLINE_SECONDS,
            ):
                now = time.perf_counter()
                if count := len(response.token_ids):
                    gap = now - before if before else None
                    self.arrivals.append(Arrival(now, count, gap))
                    before = now
                tokens.extend(response.token_ids)
                reason = response.finish_reason or reason
            if reason != rollout_pb2.FINISH_REASON_ABORT:
                return len(tokens) if reason == rollout_pb2.FINISH_REASON_LENGTH else -1
            self.aborted += 1
