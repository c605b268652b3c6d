"""Engines that generate side by side: ours, and vLLM as it comes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from rollout_svc.engine import EngineAdapter, Generation
from rollout_svc.generation.sampling import Sampling
from rollout_svc.vllm_engine.engine import VllmEngine, lora_request_of

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """`n` completions of each prompt, all of `length` tokens and all at once."""

    prompts: Sequence[Ids]
    n: int
    length: int

    @property
    def tokens(self) -> int:
        return len(self.prompts) * self.n * self.length


async def generate(
    engine: VllmEngine, load: Load, *, adapter: EngineAdapter | None = None
) -> list[Ids]:
    """One sequence of each prompt, the prompt with its first completion."""
    sampling = Sampling(n=load.n, max_tokens=load.length, temperature=1.0, ignore_eos=True)

    async def one(prompt: Ids) -> Ids:
        request_id = uuid.uuid4().hex
        request = Generation(request_id, prompt, sampling, adapter, cache_salt=request_id)
        ids: Ids = prompt
        async with aclosing(engine.generate(request)) as deltas:
            async for delta in deltas:
                ids += delta.token_ids if delta.index == 0 else ()
        return ids

    return await asyncio.gather(*map(one, load.prompts))


class PlainVllm:
    """vLLM's own client, with nothing of ours in it."""

    def __init__(self, model: Path, **settings: Any) -> None:
        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), **settings))
        self._slots = bool(settings.get("enable_lora"))

    async def generate(self, load: Load, adapter: EngineAdapter) -> None:
        """By the adapter, which it loads first where it lacks it, or without slots by the base.

        The log-probabilities of sampled tokens come with them, as they do from ours.
        """
        lora = lora_request_of(adapter if self._slots else None)
        params = SamplingParams(
            n=load.n,
            max_tokens=load.length,
            temperature=1.0,
            ignore_eos=True,
            logprobs=0,
            output_kind=RequestOutputKind.DELTA,
        )

        async def one(prompt: Ids) -> None:
            request_id = uuid.uuid4().hex
            content = tokens_input(list(prompt), cache_salt=request_id)
            stream = self.llm.generate(content, params, request_id, lora_request=lora)
            async with aclosing(stream) as outputs:
                async for _ in outputs:
                    pass

        await asyncio.gather(*map(one, load.prompts))
