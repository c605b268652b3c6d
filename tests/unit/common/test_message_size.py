"""The largest message that passes, with TLS and without."""

from __future__ import annotations

import grpc
import pytest
from refit.v1 import adapter_pb2, adapter_pb2_grpc, rollout_pb2, rollout_pb2_grpc

from common.grpc_server import connect
from common.security import SecuritySettings
from tests.secured import (
    serving,
)

MIB = 1 << 20


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
