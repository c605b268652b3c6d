"""Calls to a replica with a real engine: what they leave behind when their callers do."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from google.protobuf import json_format
from refit.v1 import rollout_pb2, rollout_pb2_grpc

from common.grpc_server import connect, start_server
from rollout_svc.generation.generator import Generator
from rollout_svc.generation.requests import RunningRequests
from rollout_svc.life.hold import GenerationHold
from rollout_svc.life.pauses import EnginePause
from rollout_svc.life.readiness import Readiness
from rollout_svc.life.sleep import Sleep
from rollout_svc.metrics import Metrics
from rollout_svc.service import RolloutServicer
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.vllm_engine.engine import VllmEngine
from tests.eventually import eventually
from tests.generating import answered, request, sampled
from tests.integration.rollout_engine.tiny import AdapterMaker

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(180)]

Stub = rollout_pb2_grpc.RolloutServiceStub
DOCUMENT = Path(__file__).parents[3] / "docs" / "generate.md"
LONG = request(max_tokens=900, temperature=0.0, ignore_eos=True)


def servicer_of(engine: VllmEngine, registry: AdapterRegistry) -> RolloutServicer:
    pause = EnginePause(engine)
    return RolloutServicer(
        generator=Generator(
            engine=engine,
            registry=registry,
            requests=RunningRequests(abort=engine.abort, max_requests=64),
            metrics=Metrics(),
        ),
        registry=registry,
        hold=GenerationHold(pause),
        sleep=Sleep(
            engine=engine,
            registry=registry,
            pause=pause,
            readiness=Readiness(Metrics(), {}),
            enabled=False,
            grace_seconds=0,
            woken=lambda: None,
        ),
    )


@pytest_asyncio.fixture(loop_scope="package")
async def stub(engine: VllmEngine, registry: AdapterRegistry) -> AsyncIterator[Stub]:
    servicer = servicer_of(engine, registry)

    def register(server: grpc.aio.Server) -> None:
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server)

    server = await start_server(register, host="127.0.0.1", port=0, services=[])
    async with connect(server.address) as channel:
        yield Stub(channel)
    await server.stop(0)


async def is_free(stub: Stub, engine: VllmEngine) -> None:
    """No request is left, in vLLM's client or behind it: a new one is decoded at once."""
    await eventually(lambda: engine.llm.get_num_unfinished_requests() == 0)
    asked = request(max_tokens=4, temperature=0.0, ignore_eos=True)
    answer = [message async for message in stub.Generate(asked, timeout=10)]
    assert len(sampled(answer)) == 4


@pytest.mark.parametrize("timeout_seconds", [None, 1.0])
async def test_calls_that_end_leave_no_request(
    stub: Stub, engine: VllmEngine, timeout_seconds: float | None
) -> None:
    """faults.md 23: more than the engine decodes at once; cancelled, or at their deadline."""
    calls = [stub.Generate(LONG, timeout=timeout_seconds) for _ in range(12)]
    await eventually(lambda: engine.llm.get_num_unfinished_requests() == 12)
    assert await calls[0].read() is not grpc.aio.EOF
    if timeout_seconds is None:
        for call in calls:
            call.cancel()
    await is_free(stub, engine)
    expected = grpc.StatusCode.DEADLINE_EXCEEDED if timeout_seconds else grpc.StatusCode.CANCELLED
    assert {await call.code() for call in calls} == {expected}


async def test_a_batch_that_ends_leaves_no_request(stub: Stub, engine: VllmEngine) -> None:
    batch = rollout_pb2.GenerateBatchRequest(requests=[LONG] * 12)
    call = stub.GenerateBatch(batch, timeout=60)
    await anext(aiter(call))
    assert engine.llm.get_num_unfinished_requests() == 12
    call.cancel()
    await is_free(stub, engine)


async def test_a_batch_answers_what_each_alone_gets(stub: Stub, engine: VllmEngine) -> None:
    asked = [
        request(ids=tuple(range(first, first + 9)), max_tokens=8, temperature=0.0, ignore_eos=True)
        for first in range(20)
    ]
    alone = [sampled(await answered(stub, one)) for one in asked[:3]]
    answers: list[list[rollout_pb2.GenerateResponse]] = [[] for _ in asked]
    batch = rollout_pb2.GenerateBatchRequest(requests=asked)
    async for message in stub.GenerateBatch(batch, timeout=60):
        answers[message.request_index].append(message.response)
    assert [sampled(answer) for answer in answers[:3]] == alone
    assert [answer[-1].finish_reason for answer in answers] == [2] * 20
    assert [len(sampled(answer)) for answer in answers] == [8] * 20


async def test_an_aborted_call_goes_on_in_the_next(stub: Stub, engine: VllmEngine) -> None:
    asked = request(max_tokens=200, temperature=0.0, ignore_eos=True)
    whole = sampled(await answered(stub, asked))
    asked.request_id = "aborted"
    begun = []
    async for message in stub.Generate(asked, timeout=60):
        begun.append(message)
        if len(begun) == 5:
            await engine.abort("aborted")
    assert begun[-1].finish_reason == rollout_pb2.FINISH_REASON_ABORT
    asked.prefix_token_ids.extend(sampled(begun))
    rest = await answered(stub, asked)
    assert len(sampled(begun)) < 200
    assert sampled(begun) + sampled(rest) == whole
    assert list(rest[0].prompt_token_ids) == list(begun[0].prompt_token_ids) == [65, 66, 67]


async def test_what_the_document_shows_is_answered(
    stub: Stub, registry: AdapterRegistry, adapters: AdapterMaker
) -> None:
    content, path = adapters.make(seed=1)
    await registry.commit(content, path, source="trainer")
    text = DOCUMENT.read_text()
    calls = re.findall(r"-d '(.*?)'.*?RolloutService/(\w+)", text, re.DOTALL)
    assert [method for _, method in calls] == ["Generate", "Generate", "GenerateBatch"]
    chosen, scored, batch = [request for request, _ in calls]
    (answer,) = await answered(stub, json_format.Parse(chosen, rollout_pb2.GenerateRequest()))
    assert answer.text in ("yes", "no")
    assert len(answer.top_logprobs) == len(answer.token_ids)
    (scores,) = await answered(stub, json_format.Parse(scored, rollout_pb2.GenerateRequest()))
    assert len(scores.prompt_logprobs) == len("The sky is blue.") - 1
    requests = json_format.Parse(batch, rollout_pb2.GenerateBatchRequest())
    came = [message async for message in stub.GenerateBatch(requests, timeout=30)]
    assert {message.request_index for message in came} == {0, 1}
    assert not any(message.HasField("error") for message in came)
