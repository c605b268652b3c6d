"""What each HTTP request passes before vLLM's OpenAI server: a route, a token, an admission."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import InvalidField, RefitError
from common.grpc_server import MAX_MESSAGE_BYTES
from common.tokens import TokenBook
from rollout_svc.generation.requests import RunningRequests
from rollout_svc.metrics import Metrics
from rollout_svc.openai_api.admission import Admission, answering
from rollout_svc.openai_api.errors import NoRoute, error_response
from rollout_svc.openai_api.models import model_list, selector_of
from rollout_svc.openai_api.renaming import Renaming
from rollout_svc.versions.live import Admitted
from rollout_svc.versions.registry import AdapterRegistry

_WAIT_SECONDS = 60.0
_MODELS = ("GET", "/v1/models")
_GENERATE = "/refit.v1.RolloutService/Generate"
_LIST = "/refit.v1.RolloutService/ListAdapters"
_VERSION = "/refit.v1.VersionService/GetVersion"

_OPEN = {("GET", "/health"), ("GET", "/ping")}
"""As with gRPC, nobody needs a token to ask for health."""

_GENERATING = {("POST", "/v1/chat/completions"), ("POST", "/v1/completions")}

ROUTES: Mapping[tuple[str, str], str] = {
    **dict.fromkeys(_OPEN, ""),
    ("GET", "/version"): _VERSION,
    ("GET", "/metrics"): _VERSION,
    _MODELS: _LIST,
    ("POST", "/tokenize"): _LIST,
    ("POST", "/detokenize"): _LIST,
    **dict.fromkeys(_GENERATING, _GENERATE),
}
"""All that exists, whatever routes a vLLM has, and the gRPC method whose roles open it."""


@dataclass(slots=True)
class Door:
    """An ASGI application before vLLM's.

    A request that it refuses is answered in OpenAI's shape, and never reaches vLLM's. One that
    generates holds its version and its place among the running requests until its answer is sent.

    Args:
        app: vLLM's.
        tokens: None: no call needs one.
    """

    app: ASGIApp
    registry: AdapterRegistry
    requests: RunningRequests
    metrics: Metrics
    tokens: TokenBook | None
    max_model_len: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as held:
            try:
                app, receive, send = await self._let_in(Request(scope, receive), send, held)
            except ClientDisconnect:
                return
            except RefitError as error:
                app = error_response(error)
            await app(scope, receive, send)

    async def _let_in(
        self, request: Request, send: Send, held: AsyncExitStack
    ) -> tuple[ASGIApp, Receive, Send]:
        """Who answers, what it reads and where it writes. Raises `RefitError`: nobody answers."""
        route = (request.method, request.url.path)
        if route not in ROUTES:
            raise NoRoute(f"path: {' '.join(route)} is not served here; see docs/openai.md")
        if self.tokens and route not in _OPEN:
            self.tokens.authorise(ROUTES[route], request.headers)
        if route == _MODELS:
            models = model_list(self.registry, max_model_len=self.max_model_len)
            return JSONResponse(models), request.receive, send
        if route not in _GENERATING:
            return self.app, request.receive, send
        body = await _body(request)
        admission = await self._admit(_model(body), held)
        return self.app, _Replay(body, request.receive), Renaming(admission, send)

    async def _admit(self, model: Any, held: AsyncExitStack) -> Admission:
        selector, request_id = selector_of(model), uuid.uuid4().hex
        held.enter_context(self.requests.running(request_id))
        held.enter_context(self.metrics.requests_running.track_inprogress())
        use = await held.enter_async_context(AsyncExitStack())

        async def admit() -> Admitted:
            await use.aclose()
            async with self.requests.admission():
                return await use.enter_async_context(
                    self.registry.admit(selector, request_id=request_id, wait_seconds=_WAIT_SECONDS)
                )

        admission = Admission(request_id, model, await admit(), admit)
        held.enter_context(answering(admission))
        return admission


@dataclass(slots=True)
class _Replay:
    """Gives a body that was read already, and then what else comes: the client's disconnection."""

    body: bytes
    receive: Receive
    given: bool = False

    async def __call__(self) -> Message:
        if self.given:
            return await self.receive()
        self.given = True
        return {"type": "http.request", "body": self.body, "more_body": False}


async def _body(request: Request) -> bytes:
    """Raises `InvalidField`: it is larger than any message may be."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_MESSAGE_BYTES:
            raise InvalidField(f"body: more than {MAX_MESSAGE_BYTES} bytes; send less at a time")
    return bytes(body)


def _model(body: bytes) -> Any:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidField(f"body: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidField("body: no JSON object; send one with model and a prompt or messages")
    return fields.get("model")
