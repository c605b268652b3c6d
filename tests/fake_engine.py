"""An engine without a model, at the `Engine` seam."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.adapter import Dtype, ExpertLayout, Kind
from common.errors import Incompatible, InvalidField
from common.tasks import cancel, first_of
from rollout_svc.engine import (
    BoundReport,
    Capabilities,
    EngineAdapter,
    EngineDead,
    FinishReason,
    Generation,
    Merging,
    Message,
    PromptScores,
    TokenDelta,
    TopTokens,
)

LOGPROB = -0.5


def _bound(modules: int) -> list[BoundReport]:
    return [BoundReport(stage=0, bound_modules=modules, mismatches=(), error="")]


@dataclass(slots=True)
class FakeEngine:
    """Holds adapters like an engine with `slots` slots, and answers each prompt with its own ids.

    Behind a prefix it goes on as if it had sampled that itself.

    A generation gives one token a step; with `gate` cleared it stops before each, and scoring as
    well; with `one_step` the gate closes by itself behind each. While paused it stops too. With
    `may_encode` cleared a text waits in its thread; a `deaf` one heeds no abort. Every token of
    every sequence scores `score_logprob`, or `LOGPROB` where it is sampled.

    After `kill` every call raises `EngineDead` until `restart`. One that `cannot_start` stays dead.
    """

    slots: int = 3
    loaded: dict[int, EngineAdapter] = field(default_factory=dict)
    answers: list[BoundReport] = field(default_factory=lambda: _bound(2))
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    may_encode: threading.Event = field(default_factory=threading.Event)
    one_step: bool = False
    running: set[str] = field(default_factory=set)
    generations: list[Generation] = field(default_factory=list)
    deaf: bool = False
    score_logprob: float = LOGPROB
    scored: list[tuple[EngineAdapter | None, tuple[int, ...]]] = field(default_factory=list)
    weights: list[Path] = field(default_factory=list)
    """Whole models that were put in the place of its own weights, in order."""

    merges: list[Path | None] = field(default_factory=list)
    """Adapters that were summed into the weights, in order; None: the base's own again."""

    bad_weights: set[Path | None] = field(default_factory=set)
    """What cannot be loaded in place of the weights, or merged into them."""

    weights_answers: list[BoundReport] = field(default_factory=lambda: _bound(3))
    merge_answers: list[BoundReport] = field(default_factory=lambda: _bound(2))
    mark: int = 0
    asleep: bool = False
    can_sleep: bool = True
    dead: bool = False
    cannot_start: bool = False
    starts: int = 0
    """How often it was to be restarted."""

    _aborts: dict[str, asyncio.Event] = field(default_factory=dict)
    _unpaused: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()
        self.may_encode.set()
        self._unpaused.set()

    @property
    def version(self) -> str:
        return "fake"

    @property
    def capabilities(self) -> Capabilities:
        modules = ("k_proj", "q_proj")
        return Capabilities(
            max_rank=8,
            target_modules=modules,
            dtypes=tuple(Dtype),
            max_loras=self.slots,
            max_model_len=16,
            vocab_size=100,
            kinds=tuple(Kind),
            merging=Merging(modules, ExpertLayout.PER_EXPERT.factors),
        )

    @property
    def paused(self) -> bool:
        return not self._unpaused.is_set()

    @property
    def salts(self) -> list[str]:
        return [generation.cache_salt for generation in self.generations]

    def encode_text(self, text: str) -> list[int]:
        assert self.may_encode.wait(timeout=5)
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        raise InvalidField("chat: this model has no chat template; send text or token_ids")

    async def load(self, adapter: EngineAdapter, *, in_place: bool = False) -> list[BoundReport]:
        self._check_alive()
        if in_place:
            assert adapter.id in self.loaded
            assert self._idle, "a slot's bytes change under a request"
        else:
            assert len(self.loaded) < self.slots, "a load would evict an adapter"
            assert adapter.id not in self.loaded
        self.loaded[adapter.id] = adapter
        return self.answers

    async def unload(self, adapter_id: int) -> None:
        self._check_alive()
        self.loaded.pop(adapter_id, None)

    async def check_weights(self, path: Path) -> list[BoundReport]:
        self._check_alive()
        return self.weights_answers

    async def load_weights(self, path: Path) -> list[BoundReport]:
        self._check_weights_may_change()
        self.weights.append(path)
        return self._refusal(path) or self.weights_answers

    async def check_merge(self, path: Path, *, base: Path) -> list[BoundReport]:
        self._check_alive()
        return self.merge_answers

    async def merge(self, path: Path | None, *, base: Path) -> list[BoundReport]:
        self._check_weights_may_change()
        self.merges.append(path)
        return self._refusal(path) or self.merge_answers

    async def mark_weights(self, mark: int) -> None:
        self._check_weights_may_change()
        self.mark = mark

    def _check_weights_may_change(self) -> None:
        self._check_alive()
        assert self._idle, "weights change under a request"

    @property
    def _idle(self) -> bool:
        return self.paused or not self.running

    def _refusal(self, path: Path | None) -> list[BoundReport]:
        if path not in self.bad_weights:
            return []
        return [BoundReport(stage=0, bound_modules=0, mismatches=(), error="OSError: damaged")]

    async def generate(self, generation: Generation) -> AsyncGenerator[TokenDelta, None]:
        self._check_alive()
        assert not self.asleep
        self.generations.append(generation)
        self.running.add(generation.request_id)
        aborted = self._aborts[generation.request_id] = asyncio.Event()
        sampling, prompt = generation.sampling, generation.prompt_token_ids
        scores = _prompt_scores(generation)
        if sampling.max_tokens == 0:
            yield TokenDelta(0, (), (), "", FinishReason.LENGTH, prompt=scores)
        try:
            for number in range(len(generation.prefix_token_ids), sampling.max_tokens):
                await self._step(aborted)
                if self.one_step:
                    self.gate.clear()
                if aborted.is_set():
                    for index in range(sampling.n):
                        yield TokenDelta(index, (), (), "", FinishReason.ABORT, self.mark)
                    return
                assert generation.adapter is None or generation.adapter.id in self.loaded
                for index in range(sampling.n):
                    yield TokenDelta(
                        index=index,
                        token_ids=(token := prompt[(number + index) % len(prompt)],),
                        logprobs=(LOGPROB,),
                        text=chr(token),
                        finish_reason=(
                            FinishReason.LENGTH if number == sampling.max_tokens - 1 else None
                        ),
                        mark=self.mark,
                        top=_top(sampling.top_logprobs, 1),
                        prompt=scores,
                    )
                    scores = None
        finally:
            self.running.remove(generation.request_id)
            del self._aborts[generation.request_id]

    async def _step(self, aborted: asyncio.Event) -> None:
        if self.paused or not self.gate.is_set():
            opened = asyncio.ensure_future(self._may_step())
            try:
                await first_of(aborted, opened)
            finally:
                await cancel(opened)
        self._check_alive()

    async def _may_step(self) -> None:
        while self.paused or not self.gate.is_set():
            await self.gate.wait()
            await self._unpaused.wait()

    async def abort(self, request_id: str) -> None:
        self._check_alive()
        if request_id in self._aborts and not self.deaf:
            self._aborts[request_id].set()

    async def score(self, adapter: EngineAdapter | None, token_ids: tuple[int, ...]) -> list[float]:
        self._check_alive()
        assert adapter is None or adapter.id in self.loaded
        await self.gate.wait()
        self.scored.append((adapter, token_ids))
        return [self.score_logprob] * (len(token_ids) - 1)

    async def pause(self) -> None:
        self._check_alive()
        self._unpaused.clear()

    async def resume(self) -> None:
        self._check_alive()
        self._unpaused.set()

    async def sleep(self) -> None:
        self._check_alive()
        if not self.can_sleep:
            raise Incompatible("engine: started without enable_sleep_mode; set it")
        assert not self.running, "the engine sleeps under a request"
        self.asleep = True

    async def wake_up(self) -> None:
        self._check_alive()
        self.asleep = False
        # As vLLM's scheduler does.
        self._unpaused.set()

    async def check_health(self) -> None:
        self._check_alive()

    def kill(self) -> None:
        """Running requests end with `EngineDead`, and so does every call."""
        self.dead = True
        for aborted in self._aborts.values():
            aborted.set()

    def _check_alive(self) -> None:
        if self.dead:
            raise EngineDead("the engine ended")

    async def restart(self) -> None:
        self.starts += 1
        if self.cannot_start:
            raise EngineDead("the engine did not start")
        self.dead = self.asleep = False
        self.loaded.clear()
        self.mark = 0
        self._unpaused.set()


def _top(count: int, positions: int) -> tuple[TopTokens, ...]:
    """Token `number` is the likeliest but `number`, everywhere."""
    likeliest = tuple((number, LOGPROB - number) for number in range(count))
    return (likeliest,) * positions if count else ()


def _prompt_scores(generation: Generation) -> PromptScores | None:
    count = generation.sampling.prompt_logprobs
    if count is None:
        return None
    positions = len(generation.prompt_token_ids) - 1
    return PromptScores((LOGPROB,) * positions, _top(count, positions))
