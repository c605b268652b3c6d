"""What becomes of requests when the replica drains, over a real gRPC server."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from refit.v1 import rollout_pb2, rollout_pb2_grpc

from common.grpc_server import GrpcServer
from rollout_svc.generation import requests
from rollout_svc.service import RolloutServicer
from tests.eventually import eventually
from tests.fake_engine import FakeEngine
from tests.generating import refused, request


async def test_draining_refuses_new_requests_and_waits_for_running_ones(
    stub: rollout_pb2_grpc.RolloutServiceStub, servicer: RolloutServicer, engine: FakeEngine
) -> None:
    call = aiter(stub.Generate(request(), timeout=5))
    await anext(call)
    engine.gate.clear()
    draining = asyncio.create_task(servicer.generator.requests.drain(5))
    await asyncio.sleep(0)
    assert (await refused(stub, request()))[0] is grpc.StatusCode.UNAVAILABLE
    engine.gate.set()
    assert [message.finish_reason async for message in call] == [0, 2]
    await draining


async def test_what_the_grace_is_too_short_for_ends_with_the_tokens_it_has(
    stub: rollout_pb2_grpc.RolloutServiceStub, servicer: RolloutServicer, engine: FakeEngine
) -> None:
    """Every completion gets its end and the stream is OK; the next replica samples it anew."""
    asked = request(request_id="one", n=2)
    engine.one_step = True
    call = aiter(stub.Generate(asked, timeout=5))
    begun = [await anext(call), await anext(call)]
    await servicer.generator.requests.drain(0.05)
    ended = [message async for message in call]
    assert [message.finish_reason for message in begun + ended] == [0, 0, 3, 3]
    assert [message.index for message in ended] == [0, 1]
    assert [list(message.token_ids) for message in ended] == [[], []]
    assert not servicer.generator.answers.recall(asked)


async def test_a_request_that_waits_for_its_version_is_sent_elsewhere_by_a_drain(
    stub: rollout_pb2_grpc.RolloutServiceStub, servicer: RolloutServicer, engine: FakeEngine
) -> None:
    newer = rollout_pb2.AdapterSelector(
        adapter="default", rule=rollout_pb2.VERSION_RULE_AT_LEAST, version=9
    )
    waiting = asyncio.ensure_future(refused(stub, request(adapter=newer)))
    await eventually(lambda: servicer.generator.requests._ids)
    await servicer.generator.requests.drain(0.05)
    code, text = await waiting
    assert code is grpc.StatusCode.UNAVAILABLE
    assert text == "replica: shutting down; send the request to another one"
    assert not engine.salts


async def test_an_engine_that_heeds_no_abort_is_left_behind(
    stub: rollout_pb2_grpc.RolloutServiceStub,
    servicer: RolloutServicer,
    server: GrpcServer,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """faults.md 23: every wait of a drain has a deadline; stopping the server ends the rest."""
    monkeypatch.setattr(requests, "_ABORT_SECONDS", 0.05)
    engine.deaf = True
    engine.gate.clear()
    waiting = asyncio.ensure_future(refused(stub, request()))
    await eventually(lambda: engine.running)
    async with asyncio.timeout(2):
        await servicer.generator.requests.drain(0.05)
        assert engine.running
        await server.stop(0)
        assert (await waiting)[0] is grpc.StatusCode.UNAVAILABLE
        await eventually(lambda: not engine.running)
