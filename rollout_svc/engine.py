"""What the rollout service needs of an inference engine. `VllmEngine` is the one that runs."""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from common.adapter import Dtype, ExpertLayout, Kind, Layout
from common.errors import Unavailable
from rollout_svc.sampling import Sampling


class EngineDead(Unavailable):
    """The engine process ended; only a restart of the replica helps."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the engine can load and take."""

    max_rank: int
    target_modules: tuple[str, ...]
    dtypes: tuple[Dtype, ...]
    max_loras: int
    max_model_len: int
    vocab_size: int
    kinds: tuple[Kind, ...] = (Kind.LORA,)
    layouts: tuple[Layout, ...] = ExpertLayout.PER_EXPERT.factors


@dataclass(frozen=True, slots=True)
class EngineAdapter:
    """One loaded PEFT directory; `id` and `name` are never used for other bytes."""

    id: int
    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class BoundReport:
    """What one rank says after a load.

    `unbound` names the tensors that no module of this rank took, each with the reason; `stage` is
    the rank's pipeline stage; `error` is the engine's own refusal, empty when it loaded.
    """

    stage: int
    bound_modules: int
    unbound: tuple[str, ...]
    error: str


class FinishReason(enum.Enum):
    """Why a completion ended; the value is vLLM's word for it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Generation:
    """A request as the engine takes it; `adapter` None asks for the base model."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    adapter: EngineAdapter | None
    cache_salt: str


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """The next tokens of completion `index`, each with its log-probability (natural logarithm)."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


class Engine(Protocol):
    """The seam; every method but the pure ones raises `EngineDead` once the engine is gone."""

    @property
    def version(self) -> str:
        """The engine's own version."""

    @property
    def capabilities(self) -> Capabilities:
        """Fixed from the start on."""

    def encode_text(self, text: str) -> list[int]:
        """Tokenize, in any thread; raises `InvalidField` without a tokenizer."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Render by the model's chat template, in any thread.

        Raises:
            InvalidField: there is no template, or it refuses these messages.
        """

    async def load(self, adapter: EngineAdapter) -> list[BoundReport]:
        """Load on every rank and say what was bound there; the caller unloads what it refuses."""

    async def unload(self, adapter_id: int) -> None:
        """Free the slot on every rank; without effect when it is not loaded."""

    async def check_weights(self, path: Path) -> list[BoundReport]:
        """Find a parameter for every tensor of a staged model, on every rank; nothing changes."""

    async def load_weights(self, path: Path | None) -> list[BoundReport]:
        """Put a staged model in the place of the engine's own weights; None: what it started on.

        Nothing may be generated meanwhile. After an error the weights are of no use.
        """

    def generate(self, generation: Generation) -> AsyncGenerator[TokenDelta, None]:
        """Stream tokens; closing the generator ends the request in the engine.

        Raises:
            InvalidField: the engine cannot take the prompt or the parameters.
        """

    async def abort(self, request_id: str) -> None:
        """End a running request: each completion that has not finished ends with ABORT.

        Without effect on an unknown id, so also on one whose generator has not begun.
        """

    async def score(self, adapter: EngineAdapter | None, token_ids: tuple[int, ...]) -> list[float]:
        """Log-probability (natural, temperature 1) of each token but the first given those before.

        Computed anew under the loaded adapter, None being the base; no cached prefix is read or
        left to read.

        Raises:
            InvalidField: the engine cannot take the tokens.
        """

    async def pause(self) -> None:
        """Freeze running requests where they are; new ones wait."""

    async def resume(self) -> None:
        """Go on; without effect when nothing is paused."""

    async def check_health(self) -> None:
        """Raises `EngineDead` once the engine cannot answer any more."""
