"""Tokens and their roles, on real connections."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from refit.v1 import adapter_pb2, adapter_pb2_grpc, rollout_pb2, trainer_pb2, version_pb2

from common.grpc_server import connect
from common.security import SecuritySettings
from common.tokens import ANY, NEEDED
from tests.certificates import Authority
from tests.secured import (
    ADMIN_TOKEN,
    GENERATE_TOKEN,
    SERVICE,
    SUBSCRIBE_TOKEN,
    Adapters,
    generate,
    list_adapters,
    presenting,
    resume,
    serving,
)


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
        "RolloutService/GenerateBatch": ("generate",),
        "RolloutService/ListAdapters": ("generate",),
        # None: not listed, and so for admin.
        "RolloutService/PauseGeneration": None,
        "RolloutService/ResumeGeneration": None,
        "RolloutService/Sleep": None,
        "RolloutService/WakeUp": None,
        "TrainerService/GetStatus": ANY,
        "TrainerService/SaveCheckpoint": None,
        "TrainerService/StopRun": None,
        "VersionService/GetVersion": ANY,
    }


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
