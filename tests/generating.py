"""Requests to generate, and what comes of them."""

from __future__ import annotations

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
) -> rollout_pb2.GenerateRequest:
    return rollout_pb2.GenerateRequest(
        request_id=request_id,
        token_ids=rollout_pb2.TokenIds(ids=ids),
        sampling=rollout_pb2.SamplingParams(max_tokens=max_tokens),
        adapter=adapter,
        n=n,
    )


async def answered(
    stub: rollout_pb2_grpc.RolloutServiceStub, asked: rollout_pb2.GenerateRequest
) -> list[rollout_pb2.GenerateResponse]:
    return [message async for message in stub.Generate(asked, timeout=5)]


async def refused(
    stub: rollout_pb2_grpc.RolloutServiceStub, asked: rollout_pb2.GenerateRequest
) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(stub.Generate(asked, timeout=5)))
    return caught.value.code(), caught.value.details() or ""
