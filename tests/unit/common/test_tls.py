"""TLS, client certificates and the plaintext health port, on real connections."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from common.errors import ConfigError
from common.security import SecuritySettings
from tests.certificates import Authority
from tests.secured import (
    check_health,
    generate,
    list_adapters,
    serving,
)


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
