"""The OpenAI endpoint of a real engine, and clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from common.rules import Rules
from common.stream.content import Content
from rollout_svc.config import RolloutConfig
from rollout_svc.generation.requests import RunningRequests
from rollout_svc.metrics import Metrics
from rollout_svc.openai_api.server import openai_served
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.vllm_engine.engine import VllmEngine
from tests.integration.rollout_engine.tiny import (
    PROMPT,
    AdapterMaker,
)

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
IDS: Any = {"return_token_ids": True}


@dataclass(frozen=True, slots=True)
class Endpoint:
    client: AsyncOpenAI
    http: httpx.AsyncClient
    requests: RunningRequests
    metrics: Metrics

    async def complete(self, model: str, **fields: Any) -> Any:
        """24 greedy tokens of a completion of `PROMPT`, with log-probabilities."""
        asked: dict[str, Any] = {"prompt": list(PROMPT), "max_tokens": 24, "logprobs": 0}
        asked |= {"temperature": 0.0, "extra_body": IDS | {"ignore_eos": True}}
        return await self.client.completions.create(model=model, **(asked | fields))


@asynccontextmanager
async def serving(
    config: RolloutConfig, engine: VllmEngine, registry: AdapterRegistry, **arguments: Any
) -> AsyncIterator[Endpoint]:
    """With `arguments` of vLLM's server."""
    requests, metrics = RunningRequests(engine.abort, max_requests=4), Metrics()
    served = openai_served(
        config.model_copy(update={"openai_port": 0, "openai_args": arguments}),
        engine,
        registry=registry,
        requests=requests,
        metrics=metrics,
    )
    async with served as url:
        assert url is not None
        async with (
            AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            httpx.AsyncClient(base_url=url) as http,
        ):
            yield Endpoint(client, http, requests, metrics)


async def commit(
    registry: AdapterRegistry, adapters: AdapterMaker, *, seed: int, rules: Rules | None = None
) -> Path:
    """The version's directory."""
    content, path = adapters.make(seed=seed)
    if rules:
        content = Content.whole(content.ref, content.manifest, content.buffer, rules=rules)
    await registry.commit(content, path, source="trainer")
    return path
