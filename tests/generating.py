"""Requests to generate, and what comes of them."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from refit.v1 import rollout_pb2, rollout_pb2_grpc

LATEST = rollout_pb2.AdapterSelector(adapter="default", rule=rollout_pb2.VERSION_RULE_LATEST)
BASE = rollout_pb2.AdapterSelector(rule=rollout_pb2.VERSION_RULE_BASE)


def request(
    *,
    adapter: rollout_pb2.AdapterSelector = BASE,
    ids: tuple[int, ...] = (65, 66, 67),
    max_tokens: int = 3,
    request_id: str = "",
    n: int = 1,
    prefix: tuple[int, ...] = (),
    final_only: bool = False,
    **sampling: Any,
) -> rollout_pb2.GenerateRequest:
    return rollout_pb2.GenerateRequest(
        request_id=request_id,
        token_ids=rollout_pb2.TokenIds(ids=ids),
        sampling=rollout_pb2.SamplingParams(max_tokens=max_tokens, **sampling),
        adapter=adapter,
        n=n,
        prefix_token_ids=prefix,
        final_only=final_only,
    )


async def answered(
    stub: rollout_pb2_grpc.RolloutServiceStub, asked: rollout_pb2.GenerateRequest
) -> list[rollout_pb2.GenerateResponse]:
    return [message async for message in stub.Generate(asked, timeout=5)]


def sampled(answer: list[rollout_pb2.GenerateResponse], index: int = 0) -> list[int]:
    """The tokens of one completion."""
    return [token for part in answer if part.index == index for token in part.token_ids]


async def failed(
    stub: rollout_pb2_grpc.RolloutServiceStub, asked: rollout_pb2.GenerateRequest
) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(stub.Generate(asked, timeout=5)))
    return caught.value


async def refused(
    stub: rollout_pb2_grpc.RolloutServiceStub, asked: rollout_pb2.GenerateRequest
) -> tuple[grpc.StatusCode, str]:
    error = await failed(stub, asked)
    return error.code(), error.details() or ""
