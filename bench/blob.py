"""The same gRPC stack without Refit: one blob, in chunks, into one preallocated buffer."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import uvloop
from refit.v1 import adapter_pb2

from common.grpc_server import GrpcServer, connect, start_server
from common.wire import CHUNK_BYTES

_METHOD = "/bench.Blob/Get"
_DEADLINE_SECONDS = 120.0


async def serve_blob(blob: memoryview) -> GrpcServer:
    """Serve one blob to whoever asks."""

    async def get(request: bytes, context: Any) -> AsyncGenerator[adapter_pb2.AdapterChunk]:
        for begin in range(0, len(blob), CHUNK_BYTES):
            yield adapter_pb2.AdapterChunk(data=bytes(blob[begin : begin + CHUNK_BYTES]))

    handler: Any = grpc.unary_stream_rpc_method_handler(
        get, response_serializer=adapter_pb2.AdapterChunk.SerializeToString
    )
    handlers = grpc.method_handlers_generic_handler("bench.Blob", {"Get": handler})
    return await start_server(
        lambda server: server.add_generic_rpc_handlers([handlers]),
        host="127.0.0.1",
        port=0,
        services=[],
    )


async def download_seconds(address: str, size_bytes: int) -> float:
    """From the request to the last byte in the buffer."""
    buffer = memoryview(bytearray(size_bytes))
    async with connect(address) as channel:
        await channel.channel_ready()
        get: Any = channel.unary_stream(
            _METHOD, response_deserializer=adapter_pb2.AdapterChunk.FromString
        )
        begun, end = time.perf_counter(), 0
        async for chunk in get(b"", timeout=_DEADLINE_SECONDS):
            data = chunk.data
            buffer[end : end + len(data)] = data
            end += len(data)
        assert end == size_bytes
        return time.perf_counter() - begun


if __name__ == "__main__":
    uvloop.install()
    print(asyncio.run(download_seconds(sys.argv[1], int(sys.argv[2]))))
