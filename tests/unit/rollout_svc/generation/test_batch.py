"""Many requests in one stream, over a real gRPC server."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import grpc
import pytest
from refit.v1 import rollout_pb2, rollout_pb2_grpc

from rollout_svc.generation.batch import Batch
from tests.eventually import eventually
from tests.fake_engine import FakeEngine
from tests.generating import LATEST, answered, request, sampled

Batched = rollout_pb2.GenerateBatchResponse


def batch_of(*requests: rollout_pb2.GenerateRequest) -> rollout_pb2.GenerateBatchRequest:
    return rollout_pb2.GenerateBatchRequest(requests=requests)


async def outcomes(
    stub: rollout_pb2_grpc.RolloutServiceStub, *requests: rollout_pb2.GenerateRequest
) -> dict[int, list[Batched]]:
    by_request: dict[int, list[Batched]] = defaultdict(list)
    async for message in stub.GenerateBatch(batch_of(*requests), timeout=5):
        by_request[message.request_index].append(message)
    return by_request


async def test_each_is_answered_as_by_generate_or_refused_by_itself(
    stub: rollout_pb2_grpc.RolloutServiceStub,
) -> None:
    asked = [
        request(ids=(70, 71), request_id="first"),
        request(max_tokens=0),
        request(n=2, final_only=True),
        request(adapter=LATEST),
    ]
    came = await outcomes(stub, *asked)
    assert sorted(came) == [0, 1, 2, 3]
    for index in (0, 2):
        answer = [message.response for message in came[index]]
        alone = rollout_pb2.GenerateRequest()
        alone.CopyFrom(asked[index])
        alone.request_id = ""
        assert answer == await answered(stub, alone)
    (malformed,), (unknown,) = came[1], came[3]
    assert malformed.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert malformed.error.message.startswith("sampling.max_tokens: 0; ")
    assert unknown.error.code == grpc.StatusCode.NOT_FOUND.value[0]
    assert unknown.error.message.startswith("adapter: default@latest is not served")
    assert not unknown.error.HasField("retry_after_seconds")


async def test_what_the_replica_has_no_room_for_is_refused_alone(
    stub: rollout_pb2_grpc.RolloutServiceStub, engine: FakeEngine
) -> None:
    engine.gate.clear()
    requests = [request() for _ in range(6)]
    running = asyncio.ensure_future(outcomes(stub, *requests))
    await eventually(lambda: len(engine.running) == 4)
    engine.gate.set()
    came = await running
    assert [came[index][0].error.code for index in range(6)] == [0] * 4 + [8] * 2
    assert [came[index][0].error.retry_after_seconds for index in (4, 5)] == [1.0, 1.0]
    assert [sampled([m.response for m in came[index]]) for index in range(4)] == [[65, 66, 67]] * 4


async def test_a_batch_sent_again_samples_nothing_anew(
    stub: rollout_pb2_grpc.RolloutServiceStub, engine: FakeEngine
) -> None:
    """faults.md 24, SkyRL#2035: one id, one request, one effect."""
    asked = [request(request_id="one"), request(request_id="two")]
    await outcomes(stub, *asked)
    came = await outcomes(stub, *asked)
    assert [sampled([m.response for m in came[index]]) for index in (0, 1)] == [[65, 66, 67]] * 2
    assert len(engine.generations) == 2


@pytest.mark.parametrize(
    ("requests", "text"),
    [
        ([], "requests: 0; send 1 to 1024 in a batch"),
        ([request()] * 1025, "requests: 1025; send 1 to 1024 in a batch"),
        (
            [request(request_id="one"), request(), request(), request(request_id="one")],
            "requests.request_id: 'one' comes 2 times; give each its own",
        ),
    ],
)
async def test_a_batch_that_is_none_is_refused_whole(
    stub: rollout_pb2_grpc.RolloutServiceStub,
    engine: FakeEngine,
    requests: list[rollout_pb2.GenerateRequest],
    text: str,
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await outcomes(stub, *requests)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == text
    assert not engine.generations


@pytest.mark.parametrize("ends_by", ["cancel", "deadline"])
async def test_the_end_of_the_stream_ends_every_request(
    stub: rollout_pb2_grpc.RolloutServiceStub, engine: FakeEngine, ends_by: str
) -> None:
    """faults.md 23: neither a caller that leaves nor its deadline leaves work behind."""
    engine.gate.clear()
    asked = batch_of(*(request() for _ in range(4)))
    call = stub.GenerateBatch(asked, timeout=5 if ends_by == "cancel" else 0.2)
    reading = asyncio.ensure_future(anext(aiter(call)))
    await eventually(lambda: len(engine.running) == 4)
    if ends_by == "cancel":
        call.cancel()
    await eventually(lambda: not engine.running)
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await reading


async def test_a_reader_that_is_slow_holds_the_engine_up() -> None:
    """Messages that nobody takes do not pile up."""
    taken = 0

    async def answer(asked: rollout_pb2.GenerateRequest) -> Any:
        nonlocal taken
        while True:
            taken += 1
            yield rollout_pb2.GenerateResponse()

    answers = Batch(answer).answers(batch_of(request(), request()))
    await anext(answers)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert taken <= 64 + 3
    await answers.aclose()


async def test_what_nobody_foresaw_ends_the_stream() -> None:
    """Though the queue is full when it happens."""

    async def answer(asked: rollout_pb2.GenerateRequest) -> Any:
        if asked.request_id:
            await asyncio.sleep(0)
            raise ZeroDivisionError
        while True:
            yield rollout_pb2.GenerateResponse()

    answers = Batch(answer).answers(batch_of(request(), request(request_id="bad")))
    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(5):
            while True:
                await anext(answers)
