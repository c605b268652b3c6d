"""A replica that sleeps, over a real gRPC server."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from refit.v1 import rollout_pb2, rollout_pb2_grpc

from common.adapter import AdapterRef
from common.errors import Unavailable
from rollout_svc.life.hold import GenerationHold
from rollout_svc.life.pauses import EnginePause
from rollout_svc.life.sleep import Sleep
from rollout_svc.service import RolloutServicer
from rollout_svc.versions.registry import AdapterRegistry
from tests.eventually import eventually
from tests.fake_engine import FakeEngine
from tests.generating import refused, request
from tests.live import Commits

Stub = rollout_pb2_grpc.RolloutServiceStub
FIRST = AdapterRef("run", "default", 1, bytes(32))


async def test_asleep_it_refuses_requests_and_awake_it_answers(
    stub: Stub, engine: FakeEngine
) -> None:
    for _ in range(2):  # the second call has no effect
        await stub.Sleep(rollout_pb2.SleepRequest(), timeout=5)
        assert engine.asleep
        code, text = await refused(stub, request())
        assert code is grpc.StatusCode.UNAVAILABLE
        assert text == "replica: asleep; send the request to another one, or wake it up"
    for _ in range(2):
        await stub.WakeUp(rollout_pb2.WakeUpRequest(), timeout=5)
        assert not engine.asleep
        assert [m async for m in stub.Generate(request(), timeout=5)][-1].finish_reason == 2


async def test_running_requests_have_the_grace_and_end_with_the_tokens_they_have(
    stub: Stub, engine: FakeEngine
) -> None:
    engine.one_step = True
    call = aiter(stub.Generate(request(), timeout=5))
    begun = await anext(call)
    await stub.Sleep(rollout_pb2.SleepRequest(), timeout=5)
    ended = [message async for message in call]
    assert len(begun.token_ids) == 1
    assert [message.finish_reason for message in ended] == [rollout_pb2.FINISH_REASON_ABORT]
    assert engine.asleep


async def test_a_request_that_waits_for_its_version_is_sent_elsewhere(
    stub: Stub, servicer: RolloutServicer
) -> None:
    newer = rollout_pb2.AdapterSelector(
        adapter="default", rule=rollout_pb2.VERSION_RULE_AT_LEAST, version=9
    )
    waiting = asyncio.ensure_future(refused(stub, request(adapter=newer)))
    await eventually(lambda: servicer.generator.requests.waiting)
    await stub.Sleep(rollout_pb2.SleepRequest(), timeout=5)
    code, text = await waiting
    assert code is grpc.StatusCode.UNAVAILABLE
    assert text.startswith("replica: asleep")


async def test_an_engine_that_cannot_sleep_says_so_and_goes_on(stub: Stub, sleep: Sleep) -> None:
    sleep.enabled = False
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Sleep(rollout_pb2.SleepRequest(), timeout=5)
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "engine.enable_sleep_mode: not set" in (error.value.details() or "")
    assert [message async for message in stub.Generate(request(), timeout=5)]


async def test_an_update_waits_for_the_engine_to_wake(
    sleep: Sleep, registry: AdapterRegistry, engine: FakeEngine, commit: Commits
) -> None:
    await sleep.begin()
    committing = asyncio.create_task(commit(FIRST))
    await eventually(lambda: commit.paths)
    assert not engine.loaded
    await sleep.end()
    await committing
    assert [ref.version for ref in registry.listing()] == [1]


async def test_an_update_that_waits_too_long_is_refused(
    sleep: Sleep, registry: AdapterRegistry, commit: Commits
) -> None:
    await sleep.begin()
    with pytest.raises(Unavailable, match=r"slot_wait_seconds: for 0.2 s the engine slept"):
        await commit(FIRST)
    assert registry.listing() == []
    assert not commit.paths[0].exists()


async def test_a_lease_outlives_the_sleep(
    sleep: Sleep, engine: FakeEngine, pause: EnginePause
) -> None:
    """vLLM's own wake-up would end the pause."""
    hold = GenerationHold(pause)
    await hold.pause(lease_seconds=60)
    await sleep.begin()
    await sleep.end()
    assert engine.paused
    await hold.resume()
    assert not engine.paused


async def test_what_cannot_fall_asleep_is_awake(
    sleep: Sleep, engine: FakeEngine, stub: Stub
) -> None:
    """A request that heeds no abort: the call fails, and nothing has changed."""
    engine.deaf = True
    engine.gate.clear()
    running = asyncio.ensure_future(refused(stub, request()))
    await eventually(lambda: engine.running)
    with pytest.raises(Unavailable, match="1 requests still ran"):
        await sleep.begin()
    assert not engine.asleep
    engine.gate.set()
    running.cancel()
    assert [message async for message in stub.Generate(request(), timeout=5)]
