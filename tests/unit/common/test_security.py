"""TLS, client certificates and tokens, on real connections."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from refit.v1 import (
    adapter_pb2,
    adapter_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    trainer_pb2,
    version_pb2,
)

from common import security as security_module
from common.config import dump_toml
from common.errors import ConfigError
from common.grpc_server import Context, GrpcServer, connect, start_server
from common.security import SecuritySettings
from common.tokens import ANY, NEEDED, TokenBook, read_token
from tests.certificates import Authority

SERVICE = "refit.v1.RolloutService"
ADAPTERS = "refit.v1.AdapterService"
GENERATE_TOKEN = "generate-0123456789"
SUBSCRIBE_TOKEN = "subscribe-0123456789"
ADMIN_TOKEN = "admin-0123456789"
MIB = 1 << 20


class Rollout(rollout_pb2_grpc.RolloutServiceServicer):
    async def ListAdapters(
        self, request: rollout_pb2.RolloutServiceListAdaptersRequest, context: Context
    ) -> rollout_pb2.RolloutServiceListAdaptersResponse:
        return rollout_pb2.RolloutServiceListAdaptersResponse()

    async def ResumeGeneration(
        self, request: rollout_pb2.ResumeGenerationRequest, context: Context
    ) -> rollout_pb2.ResumeGenerationResponse:
        return rollout_pb2.ResumeGenerationResponse()

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        yield rollout_pb2.GenerateResponse(index=len(request.text))


class Adapters(adapter_pb2_grpc.AdapterServiceServicer):
    """Streams one chunk of so many bytes as the replica id says, and then waits."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def AdapterUpdate(
        self, request: adapter_pb2.AdapterUpdateRequest, context: Context
    ) -> AsyncIterator[adapter_pb2.AdapterUpdateResponse]:
        chunk = adapter_pb2.AdapterChunk(data=bytes(int(request.replica_id)), crc32c=1)
        try:
            yield adapter_pb2.AdapterUpdateResponse(chunk=chunk)
            await asyncio.Event().wait()
        finally:
            self.ended.set()


@contextlib.asynccontextmanager
async def serving(
    security: SecuritySettings,
    *,
    adapters: Adapters | None = None,
    plaintext_health_port: int | None = None,
) -> AsyncIterator[GrpcServer]:
    def register(server: grpc.aio.Server) -> None:
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(Rollout(), server)
        adapter_pb2_grpc.add_AdapterServiceServicer_to_server(adapters or Adapters(), server)

    running = await start_server(
        register,
        host="127.0.0.1",
        port=0,
        services=[SERVICE, ADAPTERS],
        security=security,
        plaintext_health_port=plaintext_health_port,
    )
    try:
        yield running
    finally:
        await running.stop(0)


async def list_adapters(address: str, security: SecuritySettings | None) -> None:
    async with connect(address, security) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        await stub.ListAdapters(rollout_pb2.RolloutServiceListAdaptersRequest(), timeout=5)


async def resume(address: str, security: SecuritySettings) -> None:
    async with connect(address, security) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        await stub.ResumeGeneration(rollout_pb2.ResumeGenerationRequest(), timeout=5)


async def generate(address: str, security: SecuritySettings) -> int:
    async with connect(address, security) as channel:
        call = rollout_pb2_grpc.RolloutServiceStub(channel).Generate(
            rollout_pb2.GenerateRequest(text="four"), timeout=5
        )
        indices = [int(response.index) async for response in call]
    return indices[0]


async def check_health(address: str, security: SecuritySettings | None) -> int:
    async with connect(address, security) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
    return int(answer.status)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("ours") / "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("strangers") / "strangers")


@pytest.fixture(scope="module")
def mutual(authority: Authority) -> SecuritySettings:
    """All three files."""
    certificate, key = authority.issue("mutual")
    return SecuritySettings(tls_cert=certificate, tls_key=key, tls_ca=authority.file)


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    digest = hashlib.sha256(GENERATE_TOKEN.encode()).hexdigest()
    path.write_text(
        f'[trainer]\nsha256 = "{digest}"\nroles = ["generate"]\n'
        f'[replicas]\ntoken = "{SUBSCRIBE_TOKEN}"\nroles = ["subscribe"]\n'
        f'[operators]\ntoken = "{ADMIN_TOKEN}"\nroles = ["admin"]\n'
    )
    return path


def presenting(tmp_path: Path, token: str) -> SecuritySettings:
    path = tmp_path / "token"
    path.write_text(f"{token}\n")
    return SecuritySettings(token_file=path)


# TLS


async def test_the_same_three_files_make_a_server_and_its_client(mutual: SecuritySettings) -> None:
    async with serving(mutual) as server:
        await list_adapters(server.address, mutual)
        assert await generate(server.address, mutual) == 4


async def test_without_an_authority_a_server_takes_clients_without_certificate(
    authority: Authority, mutual: SecuritySettings
) -> None:
    async with serving(mutual.model_copy(update={"tls_ca": None})) as server:
        await list_adapters(server.address, SecuritySettings(tls_ca=authority.file))


async def test_a_client_without_certificate_is_refused_under_mtls(
    authority: Authority, mutual: SecuritySettings
) -> None:
    async with serving(mutual) as server:
        await _unavailable(server.address, SecuritySettings(tls_ca=authority.file))


async def test_a_client_of_another_authority_is_refused_under_mtls(
    authority: Authority, stranger: Authority, mutual: SecuritySettings
) -> None:
    certificate, key = stranger.issue("client")
    client = SecuritySettings(tls_cert=certificate, tls_key=key, tls_ca=authority.file)
    async with serving(mutual) as server:
        await _unavailable(server.address, client)


async def test_a_server_of_another_authority_is_refused(
    stranger: Authority, mutual: SecuritySettings
) -> None:
    async with serving(mutual.model_copy(update={"tls_ca": None})) as server:
        await _unavailable(server.address, SecuritySettings(tls_ca=stranger.file))


async def test_a_server_whose_certificate_names_another_address_is_refused(
    authority: Authority,
) -> None:
    certificate, key = authority.issue("elsewhere", address="127.0.0.2")
    async with serving(SecuritySettings(tls_cert=certificate, tls_key=key)) as server:
        await _unavailable(server.address, SecuritySettings(tls_ca=authority.file))


async def test_plaintext_and_tls_do_not_meet(mutual: SecuritySettings) -> None:
    async with serving(mutual) as server:
        await _unavailable(server.address, None)
    async with serving(SecuritySettings()) as server:
        await _unavailable(server.address, mutual)


async def _unavailable(address: str, security: SecuritySettings | None) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await list_adapters(address, security)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


# Health


async def test_under_mtls_a_second_port_answers_health_and_nothing_else(
    mutual: SecuritySettings,
) -> None:
    async with serving(mutual, plaintext_health_port=0) as server:
        probed = f"127.0.0.1:{server.plaintext_health_port}"
        assert await check_health(probed, None) == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await list_adapters(probed, None)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED

        await server.announce_shutdown()
        assert await check_health(probed, None) == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
        await check_health(probed, None)


async def test_a_health_port_in_use_is_one_clear_error(mutual: SecuritySettings) -> None:
    async with serving(mutual) as server:
        with pytest.raises(ConfigError, match=r"plaintext_health_port: .* cannot be bound"):
            async with serving(mutual, plaintext_health_port=server.port):
                raise AssertionError("bound the same port twice")


async def test_health_needs_no_token(tokens_file: Path) -> None:
    async with serving(SecuritySettings(tokens_file=tokens_file)) as server:
        assert await check_health(server.address, None) == health_pb2.HealthCheckResponse.SERVING


# Tokens


async def test_a_token_opens_what_its_role_opens(tokens_file: Path, tmp_path: Path) -> None:
    async with serving(SecuritySettings(tokens_file=tokens_file)) as server:
        client = presenting(tmp_path, GENERATE_TOKEN)
        await list_adapters(server.address, client)
        assert await generate(server.address, client) == 4
        await resume(server.address, presenting(tmp_path, ADMIN_TOKEN))


async def test_a_token_of_another_role_is_told_which_one_it_needs(
    tokens_file: Path, tmp_path: Path
) -> None:
    """Of a stream and of a unary call; admin does not include the other roles."""
    async with serving(SecuritySettings(tokens_file=tokens_file)) as server:
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            await generate(server.address, presenting(tmp_path, ADMIN_TOKEN))
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await resume(server.address, presenting(tmp_path, GENERATE_TOKEN))

    assert stream.value.code() == unary.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert stream.value.details() == (
        "authorization: /refit.v1.RolloutService/Generate needs the role generate, token "
        "'operators' has admin; use another token"
    )
    assert unary.value.details() == (
        "authorization: /refit.v1.RolloutService/ResumeGeneration needs the role admin, token "
        "'trainer' has generate; use another token"
    )


async def test_no_token_and_an_unknown_one_are_unauthenticated(
    tokens_file: Path, tmp_path: Path
) -> None:
    unknown = "unknown-0123456789"
    async with serving(SecuritySettings(tokens_file=tokens_file)) as server:
        with pytest.raises(grpc.aio.AioRpcError) as without:
            await list_adapters(server.address, None)
        with pytest.raises(grpc.aio.AioRpcError) as wrong:
            await generate(server.address, presenting(tmp_path, unknown))

    assert without.value.code() == wrong.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert "send `authorization: Bearer TOKEN`" in str(without.value.details())
    assert unknown not in str(wrong.value.details())


async def test_a_server_without_tokens_asks_for_none(tmp_path: Path) -> None:
    async with serving(SecuritySettings()) as server:
        await list_adapters(server.address, None)
        await list_adapters(server.address, presenting(tmp_path, GENERATE_TOKEN))


async def test_tokens_travel_over_mtls(
    mutual: SecuritySettings, tokens_file: Path, tmp_path: Path
) -> None:
    client = presenting(tmp_path, GENERATE_TOKEN)
    both = mutual.model_copy(update={"tokens_file": tokens_file, "token_file": client.token_file})
    async with serving(both) as server:
        await list_adapters(server.address, both)
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await list_adapters(server.address, mutual)


async def test_a_stream_with_a_token_ends_at_the_server_when_it_is_cancelled(
    tokens_file: Path, tmp_path: Path
) -> None:
    adapters = Adapters()
    client = presenting(tmp_path, SUBSCRIBE_TOKEN)
    async with (
        serving(SecuritySettings(tokens_file=tokens_file), adapters=adapters) as server,
        connect(server.address, client) as channel,
    ):
        call = adapter_pb2_grpc.AdapterServiceStub(channel).AdapterUpdate(
            adapter_pb2.AdapterUpdateRequest(replica_id="1"), timeout=5
        )
        await call.read()
        call.cancel()
        async with asyncio.timeout(2):
            await adapters.ended.wait()


async def test_a_refused_stream_stays_refused_however_often_it_is_read(
    tokens_file: Path, tmp_path: Path
) -> None:
    """Behind a client interceptor the second read would say that the stream ended well."""
    client = presenting(tmp_path, ADMIN_TOKEN)
    async with (
        serving(SecuritySettings(tokens_file=tokens_file)) as server,
        connect(server.address, client) as channel,
    ):
        call = adapter_pb2_grpc.AdapterServiceStub(channel).AdapterUpdate(
            adapter_pb2.AdapterUpdateRequest(replica_id="1"), timeout=5
        )
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError, match="PERMISSION_DENIED"):
                await call.read()


def test_every_method_has_its_role() -> None:
    files = [adapter_pb2, rollout_pb2, trainer_pb2, version_pb2]
    found = {
        f"{service.name}/{method.name}": NEEDED.get(f"/{service.full_name}/{method.name}")
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }

    assert found == {
        "AdapterService/AdapterUpdate": ("subscribe",),
        "AdapterService/ReportAdapter": ("subscribe",),
        "AdapterService/RenewLease": ("subscribe",),
        "AdapterService/ListAdapters": ("subscribe",),
        "RolloutService/Generate": ("generate",),
        "RolloutService/ListAdapters": ("generate",),
        # None: not listed, and so for admin.
        "RolloutService/PauseGeneration": None,
        "RolloutService/ResumeGeneration": None,
        "TrainerService/GetStatus": ANY,
        "TrainerService/SaveCheckpoint": None,
        "TrainerService/StopRun": None,
        "VersionService/GetVersion": ANY,
    }


# Message size


@pytest.mark.parametrize("secured", [False, True], ids=["plaintext", "mtls"])
async def test_the_largest_chunk_passes_and_a_larger_message_does_not(
    secured: bool, mutual: SecuritySettings
) -> None:
    security = mutual if secured else SecuritySettings()
    async with serving(security) as server, connect(server.address, security) as channel:
        assert await _first_chunk(channel, 4 * MIB) == 4 * MIB
        assert await _echoed_length(channel, 4 * MIB) == 4 * MIB
        with pytest.raises(grpc.aio.AioRpcError) as down:
            await _first_chunk(channel, 4 * MIB + 128 * 1024)
        with pytest.raises(grpc.aio.AioRpcError) as up:
            await _echoed_length(channel, 4 * MIB + 128 * 1024)

    assert down.value.code() == up.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def _first_chunk(channel: grpc.aio.Channel, size_bytes: int) -> int:
    call = adapter_pb2_grpc.AdapterServiceStub(channel).AdapterUpdate(
        adapter_pb2.AdapterUpdateRequest(replica_id=str(size_bytes)), timeout=5
    )
    try:
        event = await call.read()
        assert isinstance(event, adapter_pb2.AdapterUpdateResponse)
        return len(event.chunk.data)
    finally:
        call.cancel()


async def _echoed_length(channel: grpc.aio.Channel, size_bytes: int) -> int:
    stub = rollout_pb2_grpc.RolloutServiceStub(channel)
    call = stub.Generate(rollout_pb2.GenerateRequest(text="x" * size_bytes), timeout=5)
    response = await call.read()
    assert isinstance(response, rollout_pb2.GenerateResponse)
    return int(response.index)


# Files


def test_half_a_pair_is_an_error(mutual: SecuritySettings, authority: Authority) -> None:
    with pytest.raises(ConfigError, match=r"security\.tls_key: missing, but tls_cert is set"):
        SecuritySettings(tls_cert=mutual.tls_cert).check()
    with pytest.raises(ConfigError, match=r"security\.tls_cert: missing, but tls_key is set"):
        SecuritySettings(tls_key=mutual.tls_key).check()
    with pytest.raises(ConfigError, match=r"security\.tls_ca: set without tls_cert"):
        SecuritySettings(tls_ca=authority.file).check()


@pytest.mark.parametrize("field", ["tls_cert", "tls_key", "tls_ca", "tokens_file", "token_file"])
def test_a_file_that_is_not_there_is_named(
    field: str, mutual: SecuritySettings, tmp_path: Path
) -> None:
    settings = mutual.model_copy(update={field: tmp_path / "absent"})
    with pytest.raises(
        ConfigError, match=rf"security\.{field}: {tmp_path}/absent: No such file or directory; give"
    ):
        settings.check()


@pytest.mark.parametrize("field", ["tls_cert", "tls_key", "tls_ca"])
def test_a_file_that_is_not_pem_is_named(
    field: str, mutual: SecuritySettings, tmp_path: Path
) -> None:
    (tmp_path / "other").write_bytes(b"\xff\x00 not PEM")
    settings = mutual.model_copy(update={field: tmp_path / "other"})
    with pytest.raises(ConfigError, match=rf"security\.{field}: {tmp_path}/other holds no PEM"):
        settings.check()


def test_swapped_damaged_and_foreign_files_are_named(
    mutual: SecuritySettings, authority: Authority, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"security\.tls_cert: .* holds no PEM certificate"):
        mutual.model_copy(update={"tls_cert": mutual.tls_key, "tls_key": mutual.tls_cert}).check()
    with pytest.raises(ConfigError, match="do not belong together"):
        mutual.model_copy(update={"tls_key": authority.issue("other")[1]}).check()
    damaged = tmp_path / "damaged.pem"
    damaged.write_text(authority.file.read_text().replace("M", "N", 1))
    with pytest.raises(ConfigError, match=r"security\.tls_ca: .* is damaged"):
        mutual.model_copy(update={"tls_ca": damaged}).check()


async def test_a_server_does_not_start_with_a_token_it_could_not_show(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"security\.token_file: .* holds no usable token"):
        async with serving(presenting(tmp_path, "short")):
            raise AssertionError("it started")


SECRET = "a-secret-nobody-may-see"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no token"),
        (f"[a]\ntoken = {SECRET}", "not TOML"),
        (f'"{SECRET}" = ["admin"]', r"a key outside a table; write \[name\] above"),
        (f'[a]\ntoken = "{SECRET}"', "a.roles: missing or empty"),
        (f'[a]\ntoken = "{SECRET}"\nroles = []', "a.roles: missing or empty"),
        (
            f'[a]\ntoken = "{SECRET}"\nroles = ["generat"]',
            "a.roles: unknown role 'generat'; did you mean 'generate'",
        ),
        (f'[a]\ntoken = "{SECRET}"\nrole = ["admin"]', "unknown key 'role'; did you mean 'roles'"),
        ('[a]\nroles = ["admin"]', "a: give one of token and sha256"),
        (f'[a]\ntoken = "{SECRET}"\nsha256 = "0"\nroles = ["admin"]', "a: give one of"),
        (f'[a]\nsha256 = "{SECRET}"\nroles = ["admin"]', "a.sha256: no SHA-256"),
        (f'[a]\ntoken = "{SECRET} "\nroles = ["admin"]', "a.token: empty, too short or malformed"),
        ('[a]\ntoken = ""\nroles = ["admin"]', "a.token: empty, too short or malformed"),
        (
            f'[a]\ntoken = "{SECRET}"\nroles = ["admin"]\n'
            f'[b]\ntoken = "{SECRET}"\nroles = ["generate"]',
            "two names have one token",
        ),
    ],
)
def test_a_bad_tokens_file_is_one_clear_line_without_its_tokens(
    content: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        TokenBook.read(path)

    assert str(caught.value).startswith(f"security.tokens_file: {path}")
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)


def test_files_that_are_not_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"security\.token_file: .* is not UTF-8"):
        read_token(path)
    with pytest.raises(ConfigError, match=r"security\.tokens_file: .* is not UTF-8"):
        TokenBook.read(path)


def test_no_token_shows_in_what_is_printed(tokens_file: Path, tmp_path: Path) -> None:
    settings = presenting(tmp_path, GENERATE_TOKEN).model_copy(update={"tokens_file": tokens_file})
    shown = f"{settings!r} {settings.tokens()!r} {dump_toml(settings)}"

    assert str(tokens_file) in dump_toml(settings)
    for token in (GENERATE_TOKEN, SUBSCRIBE_TOKEN, ADMIN_TOKEN):
        assert token not in shown


def test_tokens_without_tls_are_warned_about_once(
    tokens_file: Path,
    tmp_path: Path,
    mutual: SecuritySettings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    security_module._warn_of_plaintext.cache_clear()
    plaintext = presenting(tmp_path, GENERATE_TOKEN).model_copy(update={"tokens_file": tokens_file})
    with caplog.at_level(logging.WARNING):
        mutual.model_copy(update=plaintext.model_dump(exclude_none=True)).check()
        assert caplog.messages == []
        for _ in range(3):
            plaintext.check()

    assert [message.split(":")[0] for message in caplog.messages] == [
        "security.tokens_file",
        "security.token_file",
    ]
    assert GENERATE_TOKEN not in caplog.text


# grpcurl, as docs/security.md shows it


async def grpcurl(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).parent / "grpcurl"),
        *arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    async with asyncio.timeout(10):
        output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def test_grpcurl_calls_a_secured_server(
    mutual: SecuritySettings, tokens_file: Path, authority: Authority
) -> None:
    files = ("-cacert", str(authority.file))
    pair = ("-cert", str(mutual.tls_cert), "-key", str(mutual.tls_key))
    header = ("-H", f"authorization: Bearer {GENERATE_TOKEN}")
    method = f"{SERVICE}/ListAdapters"
    security = mutual.model_copy(update={"tokens_file": tokens_file})
    async with serving(security) as server:
        assert await grpcurl(*files, *pair, *header, server.address, method) == (0, "{\n  \n}\n")
        code, listing = await grpcurl(*files, *pair, *header, server.address, "list")
        assert code == 0
        assert SERVICE in listing.split()

        code, answer = await grpcurl(*files, *pair, server.address, "list")
        assert code != 0
        assert "send `authorization: Bearer TOKEN`" in answer
