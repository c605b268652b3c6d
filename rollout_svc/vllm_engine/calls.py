"""Calls of vLLM's engine: its errors as this service's, and an end to each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from common.errors import InvalidField, RefitError, Unavailable
from common.tasks import cancel
from rollout_svc.engine import EngineDead

CALL_SECONDS = 60.0
_HEALTH_SECONDS = 0.25


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    """vLLM's errors as this service's.

    Raises:
        EngineDead: the engine's process ended.
        InvalidField: it takes no such request.
        Unavailable: it failed.
    """
    try:
        yield
    except EngineDeadError as error:
        raise EngineDead(
            "engine: the vLLM process ended; send the request again, or see its log"
        ) from error
    except VLLMClientError as error:
        raise InvalidField(f"request: {error}") from error
    except EngineGenerateError as error:
        raise Unavailable("engine: it failed to generate; see its log") from error


async def ask(llm: AsyncLLM, call: Any, *, within_seconds: float = CALL_SECONDS) -> Any:
    """What the engine answers to `call`, one of `llm`'s coroutines; raises what `translated` does.

    What a worker raises arrives as a plain `Exception`; the engine goes on after it. A call that an
    engine dies in is never answered, so its health is asked for meanwhile.
    """
    answer = asyncio.ensure_future(call)
    try:
        async with translated(), asyncio.timeout(within_seconds):
            while not (await asyncio.wait([answer], timeout=_HEALTH_SECONDS))[0]:
                await llm.check_health()
            return answer.result()
    except TimeoutError as error:
        raise Unavailable(f"engine: no answer in {within_seconds:.0f} s; retry later") from error
    except RefitError:
        raise
    except Exception as error:
        raise Unavailable(f"engine: {error}; retry later") from error
    finally:
        await cancel(answer)
