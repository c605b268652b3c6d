"""What the rollout service needs of an inference engine. `VllmEngine` is the one that runs."""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from common.adapter import Dtype, ExpertLayout, Kind, Layout
from common.errors import Unavailable
from rollout_svc.generation.sampling import Sampling


class EngineDead(Unavailable):
    """The engine process ended, and none has taken its place yet."""


@dataclass(frozen=True, slots=True)
class Merging:
    """What the engine can sum into its own weights; `target_modules` are PEFT projection names."""

    target_modules: tuple[str, ...]
    layouts: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the engine can load and take; `max_loras` is 0 where it has no LoRA slots."""

    max_rank: int
    target_modules: tuple[str, ...]
    dtypes: tuple[Dtype, ...]
    max_loras: int
    max_model_len: int
    vocab_size: int
    kinds: tuple[Kind, ...] = (Kind.LORA,)
    layouts: tuple[Layout, ...] = ExpertLayout.PER_EXPERT.factors
    merging: Merging | None = None


@dataclass(frozen=True, slots=True)
class EngineAdapter:
    """One loaded PEFT directory; `id` and `name` are never used for other bytes."""

    id: int
    name: str
    path: Path


class MismatchReason(enum.Enum):
    """Why a tensor has no place in the live model; the value says it in words."""

    NO_MODULE = "the model has no such module"
    NOT_ADAPTED = "this server does not adapt the module"
    SHAPE = "the module's weight has another shape"
    RANK = "the rank is above what a slot takes"
    KIND = "this server takes no such tensor"


@dataclass(frozen=True, slots=True, order=True)
class Mismatch:
    """A tensor without a place; `detail` says what was found and what was expected."""

    tensor: str
    reason: MismatchReason = field(compare=False)
    detail: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.tensor} ({self.detail or self.reason.value})"


@dataclass(frozen=True, slots=True)
class BoundReport:
    """What one rank says after a load.

    `mismatches` are the tensors that no module of this rank took; `stage` is the rank's pipeline
    stage; `error` is the engine's own refusal, empty when it loaded; `digest` is the BLAKE3, in
    hex, of the adapter's file as this rank read it, where it was merged.
    """

    stage: int
    bound_modules: int
    mismatches: tuple[Mismatch, ...]
    error: str
    digest: str = ""


class FinishReason(enum.Enum):
    """Why a completion ended; the value is vLLM's word for it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Generation:
    """A request as the engine takes it; `adapter` None asks for weights of the engine's own.

    The answer goes on behind `prefix_token_ids`, which are none of its deltas. With `final_only`
    nobody looks at a completion before its end, so that fewer deltas do.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    adapter: EngineAdapter | None
    cache_salt: str
    prefix_token_ids: tuple[int, ...] = ()
    final_only: bool = False


TopTokens: TypeAlias = "tuple[tuple[int, float], ...]"
"""The most likely token ids at one position and their log-probabilities, the likeliest first."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probability of each token of a prompt but the first, and the most likely ones there."""

    logprobs: tuple[float, ...]
    top: tuple[TopTokens, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """The next tokens of completion `index`, each with its log-probability (natural logarithm).

    `mark` is that of the weights which made all of them, as `Engine.mark_weights` set it; `prompt`
    comes with a request's first delta, where it was asked for.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason | None
    mark: int = 0
    top: tuple[TopTokens, ...] = ()
    prompt: PromptScores | None = None


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

    async def load(self, adapter: EngineAdapter, *, in_place: bool = False) -> list[BoundReport]:
        """Load on every rank and say what was bound there; the caller unloads what it refuses.

        Args:
            in_place: the id is loaded, and its slot takes other bytes; nothing may be generated.
        """

    async def unload(self, adapter_id: int) -> None:
        """Free the slot on every rank; without effect when it is not loaded."""

    async def check_weights(self, path: Path) -> list[BoundReport]:
        """Find a parameter for every tensor of a staged model, on every rank; nothing changes."""

    async def load_weights(self, path: Path) -> list[BoundReport]:
        """Put the model in directory `path` in the place of the engine's own weights.

        Nothing may be generated meanwhile. After an error the weights are of no use.
        """

    async def check_merge(self, path: Path, *, base: Path) -> list[BoundReport]:
        """Find a weight for every factor of a staged adapter, on every rank; nothing changes.

        Args:
            base: directory of the base model's own weights.
        """

    async def merge(self, path: Path | None, *, base: Path) -> list[BoundReport]:
        """Sum the adapter of directory `path` into the base's weights; None: the base's alone.

        Each weight is summed in fp32 from `base` and rounded once, whatever was merged before;
        those that neither this adapter nor the one before touches stay as they are. Nothing may be
        generated meanwhile. After an error the weights are of no use.
        """

    async def mark_weights(self, mark: int) -> None:
        """Tokens made from here on carry `mark`; call it while generation is paused. At first 0."""

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

    async def sleep(self) -> None:
        """Free the accelerator's memory; nothing may run.

        Raises:
            Incompatible: it was not started for that.
        """

    async def wake_up(self) -> None:
        """Undo `sleep`."""

    async def check_health(self) -> None:
        """Raises `EngineDead` once the engine cannot answer any more."""

    async def restart(self) -> None:
        """Start a dead engine anew, without adapters and with the weights it first had, mark 0.

        Raises:
            EngineDead: it did not start.
        """
