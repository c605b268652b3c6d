"""vLLM's errors and end words at the seam; no engine is started."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from common.errors import RefitError, Unavailable
from rollout_svc.engine import EngineDead, FinishReason
from rollout_svc.vllm_engine.answers import _finish_reason
from rollout_svc.vllm_engine.calls import ask


class Llm:
    """The one thing that a call needs of vLLM's client beside itself."""

    def __init__(self, *, dead: bool = False) -> None:
        self.dead = dead

    async def check_health(self) -> None:
        if self.dead:
            raise EngineDeadError


async def failing(error: Exception) -> None:
    raise error


async def never_answered() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (Exception("Call to refit_load failed"), Unavailable, "engine: Call to refit_load failed"),
        (EngineGenerateError(), Unavailable, "engine: it failed to generate"),
        (EngineDeadError(), EngineDead, "engine: the vLLM process ended"),
        (Unavailable("engine: busy"), Unavailable, "engine: busy"),
    ],
)
async def test_whatever_a_call_raises_is_a_domain_error(
    error: Exception, kind: type[RefitError], text: str
) -> None:
    """An update whose load fails is refused; only a dead engine ends the replica."""
    with pytest.raises(RefitError) as caught:
        await ask(cast("AsyncLLM", Llm()), failing(error))
    assert type(caught.value) is kind
    assert str(caught.value).startswith(text)


async def test_a_call_that_the_engine_died_in_ends() -> None:
    """faults.md 23: vLLM answers it never, and does not say so."""
    async with asyncio.timeout(5):
        with pytest.raises(EngineDead):
            await ask(cast("AsyncLLM", Llm(dead=True)), never_answered())


async def test_a_call_that_takes_too_long_ends() -> None:
    async with asyncio.timeout(5):
        with pytest.raises(Unavailable, match="engine: no answer in 0 s; retry later"):
            await ask(cast("AsyncLLM", Llm()), never_answered(), within_seconds=0.01)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        (None, None),
        ("stop", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
        ("abort", FinishReason.ABORT),
        ("error", FinishReason.ABORT),
        ("repetition", FinishReason.ABORT),
    ],
)
def test_a_completion_that_vllm_gave_up_is_aborted(
    word: str | None, reason: FinishReason | None
) -> None:
    assert _finish_reason(word) is reason
