"""An engine without a model, at the `Engine` seam."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.adapter import Dtype, Kind
from common.errors import InvalidField
from common.tasks import cancel, first_of
from rollout_svc.engine import (
    BoundReport,
    Capabilities,
    EngineAdapter,
    FinishReason,
    Generation,
    Message,
    TokenDelta,
)


@dataclass(slots=True)
class FakeEngine:
    """Holds adapters like an engine with `slots` slots, and answers each prompt with its own ids.

    A generation gives one token a step; with `gate` cleared it stops before each, and scoring as
    well; with `one_step` the gate closes by itself behind each. With `may_encode` cleared a text
    waits in its thread; a `deaf` one heeds no abort. Every token of every sequence scores
    `score_logprob`.
    """

    slots: int = 3
    loaded: dict[int, EngineAdapter] = field(default_factory=dict)
    answers: list[BoundReport] = field(
        default_factory=lambda: [BoundReport(stage=0, bound_modules=2, unbound=(), error="")]
    )
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    may_encode: threading.Event = field(default_factory=threading.Event)
    one_step: bool = False
    paused: bool = False
    running: set[str] = field(default_factory=set)
    salts: list[str] = field(default_factory=list)
    deaf: bool = False
    score_logprob: float = -0.5
    scored: list[tuple[EngineAdapter | None, tuple[int, ...]]] = field(default_factory=list)
    weights: list[Path | None] = field(default_factory=list)
    """What was loaded in place of its own weights, in order; None: those it started on."""

    bad_weights: set[Path | None] = field(default_factory=set)
    weights_answers: list[BoundReport] = field(
        default_factory=lambda: [BoundReport(stage=0, bound_modules=3, unbound=(), error="")]
    )
    _aborts: dict[str, asyncio.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate.set()
        self.may_encode.set()

    @property
    def version(self) -> str:
        return "fake"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            max_rank=8,
            target_modules=("k_proj", "q_proj"),
            dtypes=tuple(Dtype),
            max_loras=self.slots,
            max_model_len=16,
            vocab_size=100,
            kinds=tuple(Kind),
        )

    def encode_text(self, text: str) -> list[int]:
        assert self.may_encode.wait(timeout=5)
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        raise InvalidField("chat: this model has no chat template; send text or token_ids")

    async def load(self, adapter: EngineAdapter) -> list[BoundReport]:
        assert len(self.loaded) < self.slots, "a load would evict an adapter"
        assert adapter.id not in self.loaded
        self.loaded[adapter.id] = adapter
        return self.answers

    async def unload(self, adapter_id: int) -> None:
        self.loaded.pop(adapter_id, None)

    async def check_weights(self, path: Path) -> list[BoundReport]:
        return self.weights_answers

    async def load_weights(self, path: Path | None) -> list[BoundReport]:
        assert not self.running, "weights change under a request"
        self.weights.append(path)
        if path in self.bad_weights:
            return [BoundReport(stage=0, bound_modules=0, unbound=(), error="OSError: damaged")]
        return self.weights_answers

    async def generate(self, generation: Generation) -> AsyncGenerator[TokenDelta, None]:
        self.salts.append(generation.cache_salt)
        self.running.add(generation.request_id)
        aborted = self._aborts[generation.request_id] = asyncio.Event()
        indices = range(generation.sampling.n)
        prompt = generation.prompt_token_ids
        try:
            for number in range(generation.sampling.max_tokens):
                await self._step(aborted)
                if self.one_step:
                    self.gate.clear()
                if aborted.is_set():
                    for index in indices:
                        yield TokenDelta(index, (), (), "", FinishReason.ABORT)
                    return
                assert generation.adapter is None or generation.adapter.id in self.loaded
                last = number == generation.sampling.max_tokens - 1
                for index in indices:
                    token = prompt[(number + index) % len(prompt)]
                    reason = FinishReason.LENGTH if last else None
                    yield TokenDelta(index, (token,), (-0.5,), chr(token), reason)
        finally:
            self.running.remove(generation.request_id)
            del self._aborts[generation.request_id]

    async def _step(self, aborted: asyncio.Event) -> None:
        if not self.gate.is_set():
            opened = asyncio.ensure_future(self.gate.wait())
            try:
                await first_of(aborted, opened)
            finally:
                await cancel(opened)

    async def abort(self, request_id: str) -> None:
        if request_id in self._aborts and not self.deaf:
            self._aborts[request_id].set()

    async def score(self, adapter: EngineAdapter | None, token_ids: tuple[int, ...]) -> list[float]:
        assert adapter is None or adapter.id in self.loaded
        await self.gate.wait()
        self.scored.append((adapter, token_ids))
        return [self.score_logprob] * (len(token_ids) - 1)

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def check_health(self) -> None:
        return
