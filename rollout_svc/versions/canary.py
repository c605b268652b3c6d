"""Whether a loaded version gives the log-probabilities that its trainer says it does."""

from __future__ import annotations

import asyncio
import math

from common.adapter import AdapterRef, Canary
from common.errors import CanaryRefused, InvalidField, Unavailable
from common.tasks import gather_or_cancel
from rollout_svc.engine import Engine, EngineAdapter

_DEADLINE_SECONDS = 60.0


async def check_canary(
    engine: Engine, adapter: EngineAdapter | None, canary: Canary, *, ref: AdapterRef
) -> float:
    """Score the canary's sequences; the mean absolute difference over all their tokens.

    Raises:
        CanaryRefused: it is above the canary's bound or not a number, or a sequence is not one that
            this engine can score.
        Unavailable: the engine gave no scores within a minute, or is gone.
    """
    _check_tokens(engine, canary, ref)
    try:
        async with asyncio.timeout(_DEADLINE_SECONDS):
            scored = await gather_or_cancel(
                engine.score(adapter, sequence.token_ids) for sequence in canary.sequences
            )
    except TimeoutError as error:
        raise Unavailable(
            f"canary of {ref}: not scored within {_DEADLINE_SECONDS:.0f} s; send the version again "
            "when the engine has less to do"
        ) from error
    except InvalidField as error:
        raise CanaryRefused(f"canary of {ref}: {error}; send shorter sequences") from error
    difference = _mean_difference(canary, scored)
    if not difference <= canary.max_difference:
        raise CanaryRefused(
            f"canary of {ref}: log-probabilities differ by {difference:.4g} in the mean, at most "
            f"{canary.max_difference:.4g} is let in; check that trainer and replica have the same "
            "base model and dtype, or raise the canary's bound"
        )
    return difference


def _check_tokens(engine: Engine, canary: Canary, ref: AdapterRef) -> None:
    """Without a tokenizer vLLM checks none, and an id outside the vocabulary ends its process."""
    size = engine.capabilities.vocab_size
    ids = [token for sequence in canary.sequences for token in sequence.token_ids]
    if wrong := [token for token in ids if not 0 <= token < size]:
        raise CanaryRefused(
            f"canary of {ref}: token id {wrong[0]}; the model's ids are 0 to {size - 1}, so score "
            "it with the same base model"
        )


def _mean_difference(canary: Canary, scored: list[list[float]]) -> float:
    differences = [
        abs(found - expected)
        for sequence, scores in zip(canary.sequences, scored, strict=True)
        for expected, found in zip(sequence.logprobs, scores, strict=True)
    ]
    return math.fsum(differences) / len(differences)
