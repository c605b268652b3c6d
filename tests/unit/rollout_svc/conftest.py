"""A hand-written engine, and adapters small enough to write out."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.adapter import (
    AdapterRef,
    Dtype,
    Layout,
    LoraConfig,
    Manifest,
    TensorEntry,
    plan,
    seal,
)
from common.errors import InvalidField
from rollout_svc.adapters import AdapterRegistry
from rollout_svc.engine import (
    BoundReport,
    Capabilities,
    EngineAdapter,
    FinishReason,
    Generation,
    Message,
    TokenDelta,
)
from rollout_svc.receiver import Limits

FINGERPRINT = "f" * 64
MODULES = ("k_proj", "q_proj")


@dataclass(slots=True)
class FakeEngine:
    """Holds adapters like an engine with `slots` slots, and answers each prompt with its own ids.

    A generation gives one token a step; with `gate` cleared it stops before each.
    """

    slots: int = 3
    loaded: dict[int, EngineAdapter] = field(default_factory=dict)
    answers: list[BoundReport] = field(
        default_factory=lambda: [BoundReport(stage=0, bound_modules=2, unbound=(), error="")]
    )
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    paused: bool = False
    running: set[str] = field(default_factory=set)
    salts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def version(self) -> str:
        return "fake"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            max_rank=8,
            target_modules=MODULES,
            dtypes=tuple(Dtype),
            max_loras=self.slots,
            max_model_len=16,
            vocab_size=100,
        )

    def encode_text(self, text: str) -> list[int]:
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

    async def generate(self, generation: Generation) -> AsyncGenerator[TokenDelta, None]:
        self.salts.append(generation.cache_salt)
        self.running.add(generation.request_id)
        try:
            for number in range(generation.sampling.max_tokens):
                await self.gate.wait()
                last = number == generation.sampling.max_tokens - 1
                assert generation.adapter is None or generation.adapter.id in self.loaded
                token = generation.prompt_token_ids[number % len(generation.prompt_token_ids)]
                yield TokenDelta(
                    index=0,
                    token_ids=(token,),
                    logprobs=(-0.5,),
                    text=chr(token),
                    finish_reason=FinishReason.LENGTH if last else None,
                )
        finally:
            self.running.remove(generation.request_id)

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def check_health(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class Made:
    """One adapter: its name, its manifest and its flat buffer."""

    ref: AdapterRef
    manifest: Manifest
    buffer: bytes


def make_adapter(
    version: int = 1,
    *,
    adapter: str = "default",
    run_id: str = "run",
    fill: int | None = None,
    rank: int = 2,
    modules: tuple[str, ...] = MODULES,
    fingerprint: str = FINGERPRINT,
) -> Made:
    """q and k of one layer, every byte `fill` (the version by default); k's A is q's."""
    prefix = "base_model.model.model.layers.0.self_attn"
    entries = []
    for module, layout in itertools.product(sorted(modules, reverse=True), Layout):
        name = f"{prefix}.{module}.{layout.value}.weight"
        shape = (rank, 16) if layout is Layout.LORA_A else (16, rank)
        shared = layout is Layout.LORA_A and module == "k_proj" and "q_proj" in modules
        alias_of = f"{prefix}.q_proj.lora_A.weight" if shared else ""
        entries.append(TensorEntry(name, Dtype.FLOAT32, shape, layout, alias_of))
    specs = plan(entries)
    lora = LoraConfig(rank, 4.0, tuple(sorted(modules)))
    total_bytes = Manifest(fingerprint, lora, specs).total_bytes
    buffer = bytes([version if fill is None else fill]) * total_bytes
    manifest = Manifest(fingerprint, lora, seal(specs, memoryview(buffer)))
    return Made(AdapterRef(run_id, adapter, version, manifest.digest()), manifest, buffer)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def registry(engine: FakeEngine) -> AsyncIterator[AdapterRegistry]:
    registry = AdapterRegistry(engine=engine, slots=3, keep_versions=2, slot_wait_seconds=0.2)
    unloading = asyncio.create_task(registry.run())
    yield registry
    unloading.cancel()


@pytest.fixture
def limits() -> Limits:
    return Limits(
        base_fingerprint=FINGERPRINT,
        max_rank=8,
        target_modules=frozenset(MODULES),
        dtypes=frozenset(Dtype),
        max_bytes=1 << 20,
    )


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    path = tmp_path / "staging"
    path.mkdir()
    return path
