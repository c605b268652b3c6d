"""The HTTP server of the OpenAI endpoint, on the replica's event loop."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp

from common.errors import ConfigError
from common.security import SecuritySettings
from rollout_svc.config import RolloutConfig
from rollout_svc.engine import Engine
from rollout_svc.generation.requests import RunningRequests
from rollout_svc.metrics import Metrics
from rollout_svc.openai_api.door import Door
from rollout_svc.versions.registry import AdapterRegistry

_STOP_SECONDS = 5


@asynccontextmanager
async def openai_served(
    config: RolloutConfig,
    engine: Engine,
    *,
    registry: AdapterRegistry,
    requests: RunningRequests,
    metrics: Metrics,
) -> AsyncIterator[str | None]:
    """Answer OpenAI clients inside the block; gives the URL, None where `config` asks for none.

    Leave the block once `requests` are drained: answers that are still being sent are then sent.

    Raises:
        ConfigError: the address cannot be bound, or `openai_args` or a file of `security` cannot be
            used.
    """
    if config.openai_port is None:
        yield None
        return
    # vLLM's server is imported only where it is served.
    from rollout_svc.openai_api.app import OpenAiApp, server_arguments
    from rollout_svc.vllm_engine.engine import VllmEngine

    assert isinstance(engine, VllmEngine), "only vLLM's engine has vLLM's server"
    arguments = server_arguments(str(config.model), config.openai_args)
    app = OpenAiApp(engine, arguments, registry=registry, metrics=metrics)
    await app.set_up()
    door = Door(
        app=app,
        registry=registry,
        requests=requests,
        metrics=metrics,
        tokens=config.security.tokens(),
        max_model_len=engine.capabilities.max_model_len,
    )
    async with http_served(
        door, host=config.host, port=config.openai_port, security=config.security
    ) as url:
        yield url


@asynccontextmanager
async def http_served(
    app: ASGIApp, *, host: str, port: int, security: SecuritySettings
) -> AsyncIterator[str]:
    """Serve `app` inside the block, with TLS where `security` has it; gives the URL.

    Raises:
        ConfigError: the address cannot be bound, or a file of `security` cannot be used.
    """
    security.check()
    listening = _bind(host, port)
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=_STOP_SECONDS,
            ssl_certfile=security.tls_cert,
            ssl_keyfile=security.tls_key,
            ssl_ca_certs=str(security.tls_ca) if security.tls_ca else None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if security.tls_ca else ssl.CERT_NONE,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        scheme = "https" if security.tls_cert else "http"
        yield f"{scheme}://{host}:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the replica's."""
        yield


def _bind(host: str, port: int) -> socket.socket:
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    try:
        return socket.create_server((bare, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"openai_port: {host}:{port} cannot be bound ({error.strerror}); choose another, or 0 "
            "for a free one"
        ) from error
