"""What a request gets from a real engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

import torch
from transformers import LlamaForCausalLM

from rollout_svc.engine import FinishReason, Generation, PromptScores, TokenDelta, TopTokens
from rollout_svc.generation.sampling import Sampling
from rollout_svc.vllm_engine.engine import VllmEngine
from tests.integration.rollout_engine.tiny import PROMPT, byte_level_tokenizer, request_ids

LETTERS = tuple(byte_level_tokenizer().encode("abcdefgh"))
"""Tokens of one letter each: the tiny model's others are half characters, or nothing."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer, whole."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    top: tuple[TopTokens, ...]
    finish_reason: FinishReason | None
    scores: PromptScores | None
    deltas: int


async def ask(
    engine: VllmEngine,
    sampling: Sampling,
    *,
    prompt: tuple[int, ...] = PROMPT,
    prefix: tuple[int, ...] = (),
    final_only: bool = False,
    index: int = 0,
) -> Completion:
    """The completion `index` of the base model."""
    generation = Generation(
        request_id=next(request_ids),
        prompt_token_ids=prompt,
        sampling=sampling,
        adapter=None,
        cache_salt="base",
        prefix_token_ids=prefix,
        final_only=final_only,
    )
    async with aclosing(engine.generate(generation)) as deltas:
        every = [delta async for delta in deltas]
    return completed([delta for delta in every if delta.index == index])


def completed(deltas: list[TokenDelta]) -> Completion:
    """From the deltas of one completion."""
    return Completion(
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(value for delta in deltas for value in delta.logprobs),
        text="".join(delta.text for delta in deltas),
        top=tuple(top for delta in deltas for top in delta.top),
        finish_reason=deltas[-1].finish_reason,
        scores=next((delta.prompt for delta in deltas if delta.prompt), None),
        deltas=len(deltas),
    )


def late_word(text: str, length: int) -> tuple[str, int]:
    """A piece of the text that comes for the first time after ten letters, and where."""
    pieces = (text[at : at + length] for at in range(10, len(text) - length))
    return next((piece, at) for piece in pieces if (at := text.index(piece)) >= 10)


def logits_of(reference: LlamaForCausalLM, sequence: tuple[int, ...]) -> torch.Tensor:
    """(len(sequence), vocab): what Hugging Face says behind each token."""
    with torch.no_grad():
        logits: torch.Tensor = reference(torch.tensor([sequence])).logits[0]
    return logits


@asynccontextmanager
async def still_answers(engine: VllmEngine, sampling: Sampling) -> AsyncIterator[None]:
    """What happens inside leaves the engine as it was, without a request."""
    before = await ask(engine, sampling)
    yield
    # In how many parts an answer comes depends on the machine's load.
    assert replace(await ask(engine, sampling), deltas=before.deltas) == before
    assert engine.llm.get_num_unfinished_requests() == 0
