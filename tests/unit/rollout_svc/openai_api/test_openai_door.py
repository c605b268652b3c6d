"""What stands before vLLM's OpenAI server, over HTTP; the server itself is written by hand here."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from common.adapter import AdapterRef
from common.config import load_config
from common.errors import ConfigError
from common.security import PLAINTEXT, SecuritySettings
from common.tokens import TokenBook
from rollout_svc.config import RolloutConfig
from rollout_svc.generation.requests import RunningRequests
from rollout_svc.metrics import Metrics
from rollout_svc.openai_api import door as openai_door
from rollout_svc.openai_api.admission import Admission, current_admission
from rollout_svc.openai_api.door import ROUTES, Door
from rollout_svc.openai_api.server import http_served, openai_served
from rollout_svc.versions.registry import AdapterRegistry
from tests.certificates import Authority
from tests.eventually import eventually
from tests.fake_engine import FakeEngine
from tests.live import Commits
from tests.secured import ADMIN_TOKEN, GENERATE_TOKEN

COMPLETIONS = "/v1/completions"
OLD, NEW = (AdapterRef("run", "default", version, bytes([version])) for version in (1, 2))


@dataclass(slots=True)
class Server:
    """Answers as vLLM would, with the model's name in it, once `may_answer`."""

    admissions: list[Admission | None] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        admission = current_admission()
        self.admissions.append(admission)
        self.bodies.append((await receive()).get("body", b""))
        await self.may_answer.wait()
        name = admission.model if admission else ""
        body = json.dumps({"model": name, "text": '"model":"default@1"'}, separators=(",", ":"))
        length = str(len(body)).encode()
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]}
        )
        await send({"type": "http.response.body", "body": body.encode()})


@pytest.fixture
def server() -> Server:
    server = Server()
    server.may_answer.set()
    return server


@pytest.fixture
def door(server: Server, registry: AdapterRegistry, engine: FakeEngine) -> Door:
    return Door(
        app=server,
        registry=registry,
        requests=RunningRequests(abort=engine.abort, max_requests=2),
        metrics=Metrics(),
        tokens=None,
        max_model_len=16,
    )


@asynccontextmanager
async def served(
    door: Door, security: SecuritySettings = PLAINTEXT, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        http_served(door, host="127.0.0.1", port=0, security=security) as url,
        httpx.AsyncClient(base_url=url, **options) as client,
    ):
        yield client


@pytest.fixture
async def client(door: Door) -> AsyncIterator[httpx.AsyncClient]:
    async with served(door) as client:
        yield client


async def ask(client: httpx.AsyncClient, model: object) -> httpx.Response:
    return await client.post(COMPLETIONS, json={"model": model, "prompt": "x"})


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS"])
async def test_only_the_listed_routes_exist(
    client: httpx.AsyncClient, server: Server, method: str
) -> None:
    for path in ("/v1/load_lora_adapter", "/sleep", "/collective_rpc", "/", "//health", "/Health"):
        answer = await client.request(method, path, json={"model": "base"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "NotFoundError")
    for known_method, path in ROUTES:
        if method not in (known_method, "OPTIONS") and (method, path) not in ROUTES:
            assert (await client.request(method, path)).status_code == 404, (method, path)
    assert server.admissions == []


async def test_the_name_decides_who_answers_and_the_body_is_passed_on(
    client: httpx.AsyncClient, server: Server, commit: Commits
) -> None:
    """faults.md 2, verl#3821."""
    await commit(OLD)
    await commit(NEW)
    names = {"default": NEW, "default@1": OLD, "default@2": NEW, "base": None}
    for asked, ref in names.items():
        answer = await ask(client, asked)
        assert answer.json()["model"] == (f"default@{ref.version}" if ref else "base")
        admission = server.admissions[-1]
        assert admission is not None
        assert admission.admitted.ref == ref
        assert json.loads(server.bodies[-1]) == {"model": asked, "prompt": "x"}


async def test_who_is_not_here_is_not_found(
    client: httpx.AsyncClient, server: Server, commit: Commits
) -> None:
    await commit(OLD)
    for asked in ("default@2", "default@", "@1", "other", "Base", "default@1@1"):
        answer = await ask(client, asked)
        assert answer.status_code == 404, asked
        error = answer.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("NotFoundError", "model", 404)
        assert error["message"].endswith(f"is not served; served here: {OLD}")
    assert server.admissions == []


async def test_of_several_runs_the_one_committed_last_has_the_name(
    client: httpx.AsyncClient, commit: Commits
) -> None:
    await commit(AdapterRef("first", "default", 7, b"7"))
    await commit(AdapterRef("second", "default", 3, b"3"), source="other")
    assert (await ask(client, "default")).json()["model"] == "default@3"
    assert (await ask(client, "default@7")).status_code == 404
    listed = (await client.get("/v1/models")).json()["data"]
    assert [(card["id"], card["parent"]) for card in listed] == [
        ("base", None),
        ("default", "base"),
        ("default@3", "default"),
    ]
    assert {card["max_model_len"] for card in listed} == {16}


@pytest.mark.parametrize("adapter", ["base", "default@3"])
async def test_an_adapter_whose_name_means_another_is_told_by_its_version(
    client: httpx.AsyncClient, server: Server, commit: Commits, adapter: str
) -> None:
    """faults.md 2: neither in the base's place nor the base in its."""
    of_default, taken = AdapterRef("run", "default", 3, b"3"), AdapterRef("run", adapter, 1, b"1")
    await commit(of_default)
    await commit(taken)
    names = {"base": None, "default@3": of_default, f"{adapter}@1": taken}
    for asked, ref in names.items():
        assert (await ask(client, asked)).json()["model"] == asked
        admission = server.admissions[-1]
        assert admission is not None
        assert admission.admitted.ref == ref
    listed = (await client.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == ["base", "default", "default@3", f"{adapter}@1"]


async def test_a_base_whose_weights_are_not_here_is_neither_listed_nor_asked(
    client: httpx.AsyncClient, registry: AdapterRegistry
) -> None:
    registry.weights.missing = True
    assert (await client.get("/v1/models")).json()["data"] == []
    answer = await ask(client, "base")
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{}", "model: missing"),
        (b'{"model": null}', "model: missing"),
        (b'{"model": ["base"]}', "model: missing"),
        (b"[]", "body: no JSON object"),
        (b"{", "body: not JSON"),
        (b"\xff", "body: not JSON"),
        (b'{"model": "base"}' + b" " * (5 << 20), "body: more than"),
    ],
)
async def test_a_body_that_names_nobody_is_the_clients_mistake(
    client: httpx.AsyncClient, server: Server, body: bytes, message: str
) -> None:
    """vLLM lets the base answer a request without a model."""
    answer = await client.post(COMPLETIONS, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
    assert server.admissions == []


async def test_a_request_holds_its_version_until_it_is_answered(
    client: httpx.AsyncClient,
    server: Server,
    door: Door,
    registry: AdapterRegistry,
    commit: Commits,
) -> None:
    await commit(OLD)
    server.may_answer.clear()
    asking = asyncio.create_task(ask(client, "default"))
    await eventually(lambda: server.admissions)
    assert [live.pins for live in registry.versions.all] == [1]
    assert door.metrics.requests_running._value.get() == 1
    server.may_answer.set()
    assert (await asking).status_code == 200
    await eventually(lambda: not registry.uses)
    assert [live.pins for live in registry.versions.all] == [0]
    assert not door.requests._ids
    assert current_admission() is None


async def test_what_may_go_well_later_says_so(
    client: httpx.AsyncClient,
    server: Server,
    door: Door,
    registry: AdapterRegistry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openai_door, "_WAIT_SECONDS", 0.05)
    with registry.uses.closed():
        assert (await ask(client, "base")).status_code == 504
    server.may_answer.clear()
    running = [asyncio.create_task(ask(client, "base")) for _ in range(2)]
    await eventually(lambda: len(server.admissions) == 2)
    full = await ask(client, "base")
    assert (full.status_code, full.headers["retry-after"]) == (429, "1")
    draining = asyncio.create_task(door.requests.drain(5))
    await asyncio.sleep(0)
    gone = await ask(client, "base")
    assert (gone.status_code, gone.headers["retry-after"]) == (503, "1")
    server.may_answer.set()
    await draining
    assert [(await task).status_code for task in running] == [200, 200]


async def test_an_answer_that_another_version_went_on_with_has_its_name(
    client: httpx.AsyncClient, server: Server, commit: Commits
) -> None:
    await commit(OLD)
    server.may_answer.clear()
    asking = asyncio.create_task(ask(client, "default"))
    await eventually(lambda: server.admissions)
    [admission] = server.admissions
    assert admission is not None
    admission.newest = AdapterRef("run", "default", 10, b"10")
    server.may_answer.set()
    assert (await asking).json() == {"model": "default@10", "text": '"model":"default@1"'}


@pytest.fixture
def tokens(tmp_path: Path) -> TokenBook:
    path = tmp_path / "tokens.toml"
    path.write_text(
        f'[agent]\ntoken = "{GENERATE_TOKEN}"\nroles = ["generate"]\n'
        f'[boss]\ntoken = "{ADMIN_TOKEN}"\nroles = ["admin"]\n'
    )
    return TokenBook.read(path)


async def test_tokens_and_roles_are_those_of_grpc(
    client: httpx.AsyncClient, door: Door, tokens: TokenBook
) -> None:
    door.tokens = tokens
    expected = {"": 401, "Bearer wrong-0123456789abc": 401, f"Bearer {ADMIN_TOKEN}": 403}
    expected[f"Bearer {GENERATE_TOKEN}"] = 200
    for header, status in expected.items():
        headers = {"authorization": header} if header else {}
        for path in (COMPLETIONS, "/v1/chat/completions", "/tokenize"):
            answer = await client.post(path, json={"model": "base"}, headers=headers)
            assert answer.status_code == status, (header, path)
            assert ("www-authenticate" in answer.headers) is (status == 401)
        assert (await client.get("/v1/models", headers=headers)).status_code == status
        anyone = 401 if status == 401 else 200
        assert (await client.get("/metrics", headers=headers)).status_code == anyone
        assert (await client.get("/health", headers=headers)).status_code == 200


async def test_tls_is_spoken_where_it_is_configured(door: Door, tmp_path: Path) -> None:
    authority, stranger = Authority.create(tmp_path / "ours"), Authority.create(tmp_path / "other")
    certificate, key = authority.issue("replica")
    mine = authority.issue("client")
    theirs = stranger.issue("client")
    one_sided = SecuritySettings(tls_cert=certificate, tls_key=key)
    context = _context(authority.file)
    async with served(door, one_sided, verify=context) as client:
        assert client.base_url.scheme == "https"
        assert (await client.get("/v1/models")).status_code == 200
        async with httpx.AsyncClient() as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get(client.base_url.copy_with(scheme="http", path="/health"))
    both_sided = SecuritySettings(tls_cert=certificate, tls_key=key, tls_ca=authority.file)
    async with served(door, both_sided, verify=_context(authority.file, mine)) as client:
        assert (await client.get("/v1/models")).status_code == 200
        for pair in (None, theirs):
            other = httpx.AsyncClient(
                base_url=client.base_url, verify=_context(authority.file, pair)
            )
            async with other as unknown:
                with pytest.raises(httpx.TransportError):
                    await unknown.get("/v1/models")


def _context(authority: Path, pair: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority))
    if pair:
        context.load_cert_chain(*pair)
    return context


async def test_an_address_that_is_taken_is_a_configuration_error(door: Door) -> None:
    async with served(door) as client:
        port = client.base_url.port
        assert port is not None
        expected = re.escape(f"openai_port: 127.0.0.1:{port} cannot be bound (Address already in")
        with pytest.raises(ConfigError, match=expected):
            async with http_served(door, host="127.0.0.1", port=port, security=PLAINTEXT):
                pass


async def test_an_answer_is_sent_to_its_end_when_the_server_stops(
    door: Door, server: Server
) -> None:
    server.may_answer.clear()
    client = httpx.AsyncClient()
    async with http_served(door, host="127.0.0.1", port=0, security=PLAINTEXT) as url:
        asking = asyncio.create_task(client.post(url + COMPLETIONS, json={"model": "base"}))
        await eventually(lambda: server.admissions)
        asyncio.get_running_loop().call_later(0.3, server.may_answer.set)
    assert (await asking).json()["model"] == "base"
    with pytest.raises(httpx.ConnectError):
        await client.get(url + "/health")
    await client.aclose()


async def test_without_a_port_nothing_is_served(door: Door, engine: FakeEngine) -> None:
    served = openai_served(
        RolloutConfig(model=Path("tiny")),
        engine,
        registry=door.registry,
        requests=door.requests,
        metrics=door.metrics,
    )
    async with served as url:
        assert url is None


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            {"openai_args.tool_parser": "hermes"},
            "openai_args: .*'tool_parser' is none that is taken; did you mean 'tool_call_parser'",
        ),
        ({"openai_args.api_key": "x"}, "openai_args: .*'api_key' is none that is taken"),
        ({"openai_port": "0", "engine.skip_tokenizer_init": "true"}, "needs a tokenizer"),
        ({"openai_port": "70000"}, "openai_port: found 70000"),
    ],
)
def test_a_bad_configuration_is_refused_before_the_start(
    overrides: dict[str, str], text: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){text}"):
        load_config(RolloutConfig, None, {"model": "m", **overrides})
