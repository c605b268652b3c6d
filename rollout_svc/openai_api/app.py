"""vLLM's OpenAI server as an ASGI application on the replica's own engine."""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from starlette.types import Receive, Scope, Send
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.lora.request import LoRARequest
from vllm.tasks import SupportedTask
from vllm.utils.argparse_utils import FlexibleArgumentParser

from common.errors import ConfigError
from rollout_svc.metrics import Metrics
from rollout_svc.openai_api.admission import current_admission
from rollout_svc.openai_api.engine import AdmittedEngine
from rollout_svc.openai_api.models import BASE_MODEL, model_name, selector_of
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.vllm_engine.engine import VllmEngine

_TASKS: tuple[SupportedTask, ...] = ("generate",)


class OpenAiApp:
    """Answers what the door lets in. After a restart of the engine it is set up anew.

    Args:
        arguments: from `server_arguments`.
    """

    def __init__(
        self,
        engine: VllmEngine,
        arguments: Namespace,
        *,
        registry: AdapterRegistry,
        metrics: Metrics,
    ) -> None:
        self._engine, self._arguments = engine, arguments
        self._registry, self._metrics = registry, metrics
        with _log_level_kept():
            self._app = build_app(arguments, _TASKS, engine.llm.model_config)
        self._setting_up = asyncio.Lock()
        self._set_up_for: object = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.set_up()
        await self._app(scope, receive, send)

    async def set_up(self) -> None:
        """Make vLLM's handlers for the engine as it is now, where they are another one's."""
        async with self._setting_up:
            if self._set_up_for is not self._engine.llm:
                await self._make_handlers()

    async def _make_handlers(self) -> None:
        state, llm = self._app.state, self._engine.llm
        client = cast(EngineClient, AdmittedEngine(self._engine, self._metrics))
        with _log_level_kept():
            await init_app_state(client, state, self._arguments, _TASKS)
        # The handlers look a request's `model` up here.
        state.openai_serving_models.lora_requests = _Served(self._registry)
        state.server = None  # what vLLM would end with a dead engine; `is_running` says not to
        self._set_up_for = llm


@contextmanager
def _log_level_kept() -> Iterator[None]:
    """vLLM's server has the whole process log errors alone; this service warns."""
    level = logging.root.level
    try:
        yield
    finally:
        logging.root.setLevel(level)


@dataclass(frozen=True, slots=True)
class _Served(Mapping[str, LoRARequest]):
    """Every name of an adapter that is served; vLLM looks a request's `model` up in it.

    The values carry the name that vLLM writes into the answer, and nothing else that is used.
    """

    registry: AdapterRegistry

    def __getitem__(self, model: str) -> LoRARequest:
        name = self._answering(model)
        if name is None:
            raise KeyError(model)
        return LoRARequest(lora_name=name, lora_int_id=1, lora_path=name)

    def _answering(self, model: str) -> str | None:
        admission = current_admission()
        if admission:
            return admission.model if model == admission.asked else None
        ref = selector_of(model).pick(self.registry.listing())
        return model_name(ref) if ref else None

    def __iter__(self) -> Iterator[str]:
        return (model_name(ref) for ref in self.registry.listing())

    def __len__(self) -> int:
        return len(self.registry.listing())


def server_arguments(model: str, given: Mapping[str, Any]) -> Namespace:
    """vLLM's server arguments; the replica's own endpoint owns all that is about connections.

    Raises:
        ConfigError: vLLM refuses a value.
    """
    parser: Any = FlexibleArgumentParser
    arguments: Namespace = make_arg_parser(parser()).parse_args([])
    vars(arguments).update(given, model=model, served_model_name=[BASE_MODEL])
    # No other site's page may read an answer in a browser.
    arguments.allowed_origins = []
    try:
        validate_parsed_serve_args(arguments)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"openai_args: {error}") from error
    return arguments
