"""A real generation, before the replica says it is ready."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from common.errors import Unavailable
from rollout_svc.engine import Engine, Generation
from rollout_svc.generation.sampling import Sampling

_WARM_UP_SECONDS = 300.0
_TOKENS = 4


async def warm_up(engine: Engine) -> None:
    """Sample a few tokens from the base model; raises `Unavailable` if they do not come."""
    generation = Generation(
        request_id="warm-up",
        prompt_token_ids=(0, 1, 2, 3),
        sampling=Sampling(n=1, max_tokens=_TOKENS, ignore_eos=True),
        adapter=None,
        cache_salt="warm-up",
    )
    try:
        async with asyncio.timeout(_WARM_UP_SECONDS), aclosing(engine.generate(generation)) as new:
            count = sum([len(delta.token_ids) async for delta in new])
    except TimeoutError as error:
        raise Unavailable(f"engine: no token in {_WARM_UP_SECONDS:.0f} s; see its log") from error
    if count != _TOKENS:
        raise Unavailable(f"engine: warm-up gave {count} tokens instead of {_TOKENS}; see its log")
