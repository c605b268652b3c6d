"""The servicers behind a real gRPC server, with an engine that needs no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from refit.v1 import rollout_pb2, rollout_pb2_grpc, version_pb2, version_pb2_grpc

from common.grpc_server import GrpcServer, connect, start_server
from common.model_dir import BaseModel
from common.stream.content import Content
from common.wire import ref_to_proto
from rollout_svc import requests
from rollout_svc.adapters import AdapterRegistry
from rollout_svc.hold import GenerationHold
from rollout_svc.metrics import Metrics
from rollout_svc.requests import RunningRequests
from rollout_svc.service import RolloutServicer, VersionServicer
from tests.adapters import make_adapter, make_ref
from tests.eventually import eventually
from tests.fake_engine import FakeEngine

MANIFEST, BUFFER = make_adapter()
REF = make_ref(MANIFEST)
CONTENT = Content.whole(REF, MANIFEST, BUFFER)
LATEST = rollout_pb2.AdapterSelector(adapter="default", rule=rollout_pb2.VERSION_RULE_LATEST)
BASE = rollout_pb2.AdapterSelector(rule=rollout_pb2.VERSION_RULE_BASE)


@pytest.fixture
async def servicer(registry: AdapterRegistry, engine: FakeEngine) -> RolloutServicer:
    return RolloutServicer(
        engine=engine,
        registry=registry,
        requests=RunningRequests(abort=engine.abort, max_requests=4),
        hold=GenerationHold(engine),
        metrics=Metrics(),
    )


@pytest.fixture
async def server(servicer: RolloutServicer) -> AsyncIterator[GrpcServer]:
    def register(server: grpc.aio.Server) -> None:
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server)
        version = VersionServicer(
            engine=servicer.engine, registry=servicer.registry, base=BaseModel("tiny", "f")
        )
        version_pb2_grpc.add_VersionServiceServicer_to_server(version, server)

    server = await start_server(register, host="127.0.0.1", port=0, services=[])
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(server: GrpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(server.address) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> rollout_pb2_grpc.RolloutServiceStub:
    return rollout_pb2_grpc.RolloutServiceStub(channel)


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


async def test_every_message_names_the_weights_and_the_first_one_the_prompt(
    stub: rollout_pb2_grpc.RolloutServiceStub,
    registry: AdapterRegistry,
    engine: FakeEngine,
    tmp_path: Path,
) -> None:
    await registry.commit(CONTENT, tmp_path / "adapter", source="trainer")
    answer = [message async for message in stub.Generate(request(adapter=LATEST), timeout=5)]
    assert [list(message.token_ids) for message in answer] == [[65], [66], [67]]
    assert [list(message.logprobs) for message in answer] == [[-0.5]] * 3
    assert [message.adapter for message in answer] == [ref_to_proto(REF)] * 3
    assert [list(message.prompt_token_ids) for message in answer] == [[65, 66, 67], [], []]
    assert [message.finish_reason for message in answer] == [0, 0, 2]
    assert engine.salts == [REF.digest.hex()]


async def test_the_base_model_is_named_by_no_adapter(
    stub: rollout_pb2_grpc.RolloutServiceStub, engine: FakeEngine
) -> None:
    answer = [message async for message in stub.Generate(request(), timeout=5)]
    assert [message.HasField("adapter") for message in answer] == [False] * 3
    assert engine.salts == ["base"]


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"max_tokens": 0}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.max_tokens: 0"),
        ({"ids": ()}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids: no tokens"),
        ({"ids": (100,)}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids: token id 100"),
        ({"ids": (1,) * 16}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids: 16 tokens"),
        (
            {"adapter": rollout_pb2.AdapterSelector()},
            grpc.StatusCode.INVALID_ARGUMENT,
            "adapter.rule: 0",
        ),
        ({"adapter": LATEST}, grpc.StatusCode.NOT_FOUND, "default@latest is not served"),
    ],
)
async def test_a_bad_request_is_refused_by_field(
    stub: rollout_pb2_grpc.RolloutServiceStub,
    change: dict[str, object],
    code: grpc.StatusCode,
    text: str,
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(stub.Generate(request(**change), timeout=5)))  # type: ignore[arg-type]
    assert caught.value.code() is code
    assert text in (caught.value.details() or "")


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ({}, "prompt: missing"),
        ({"text": "A" * 1024}, "text: 1024 tokens"),
        ({"text": "A" * 1025}, "text: 1025 characters; more than 1024 cannot fit"),
        (
            {"chat": rollout_pb2.ChatMessages(messages=[{"role": "user", "content": "A" * 1025}])},
            "chat: 1025 characters; more than 1024 cannot fit",
        ),
        ({"chat": rollout_pb2.ChatMessages()}, "chat.messages: empty"),
        (
            {"chat": rollout_pb2.ChatMessages(messages=[{"role": "tool"}])},
            "chat.messages.role: 'tool'",
        ),
    ],
)
async def test_a_bad_prompt_is_refused_by_field(
    stub: rollout_pb2_grpc.RolloutServiceStub, prompt: dict[str, object], text: str
) -> None:
    bad = rollout_pb2.GenerateRequest(
        sampling=rollout_pb2.SamplingParams(max_tokens=1),
        adapter=BASE,
        **prompt,  # type: ignore[arg-type]
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(stub.Generate(bad, timeout=5)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert text in (caught.value.details() or "")


async def test_text_is_tokenized_here(stub: rollout_pb2_grpc.RolloutServiceStub) -> None:
    asked = rollout_pb2.GenerateRequest(
        text="AB", sampling=rollout_pb2.SamplingParams(max_tokens=2), adapter=BASE
    )
    answer = [message async for message in stub.Generate(asked, timeout=5)]
    assert list(answer[0].prompt_token_ids) == [65, 66]
    assert "".join(message.text for message in answer) == "AB"


async def test_a_text_is_tokenized_beside_the_event_loop(
    stub: rollout_pb2_grpc.RolloutServiceStub, engine: FakeEngine
) -> None:
    """faults.md 23: a long text holds up nobody else."""
    engine.may_encode.clear()
    asked = rollout_pb2.GenerateRequest(
        text="AB", sampling=rollout_pb2.SamplingParams(max_tokens=1), adapter=BASE
    )
    waiting = asyncio.ensure_future(anext(aiter(stub.Generate(asked, timeout=5))))
    assert len([message async for message in stub.Generate(request(), timeout=2)]) == 3
    assert not waiting.done()
    engine.may_encode.set()
    assert list((await waiting).prompt_token_ids) == [65, 66]


async def test_a_running_request_id_is_taken_until_it_ends(
    stub: rollout_pb2_grpc.RolloutServiceStub, engine: FakeEngine
) -> None:
    """faults.md 24, SkyRL#2035: of two equal requests at once one has an effect."""
    asked = request(request_id="one")
    engine.gate.clear()
    first = asyncio.ensure_future(answered(stub, asked))
    await eventually(lambda: "one" in engine.running)
    code, text = await refused(stub, asked)
    assert (code, text) == (
        grpc.StatusCode.ALREADY_EXISTS,
        "request_id: 'one' is running; choose another",
    )
    engine.gate.set()
    assert len(await first) == 3
    assert engine.salts == ["base"]


async def test_a_request_sent_again_gets_the_answer_it_had(
    stub: rollout_pb2_grpc.RolloutServiceStub,
    servicer: RolloutServicer,
    registry: AdapterRegistry,
    engine: FakeEngine,
    tmp_path: Path,
) -> None:
    """faults.md 24, SkyRL#2035: a retry samples nothing anew, and holds no adapter."""
    await registry.commit(CONTENT, tmp_path / "adapter", source="trainer")
    asked = request(adapter=LATEST, request_id="one", n=2)
    assert len(await answered(stub, asked)) == 6
    assert registry._live[0].pins == 0
    expected = [
        rollout_pb2.GenerateResponse(
            index=index,
            token_ids=ids,
            logprobs=[-0.5] * 3,
            text=bytes(ids).decode(),
            adapter=ref_to_proto(REF),
            finish_reason=rollout_pb2.FINISH_REASON_LENGTH,
            prompt_token_ids=prompt,
        )
        for index, ids, prompt in ((0, (65, 66, 67), (65, 66, 67)), (1, (66, 67, 65), ()))
    ]
    assert await answered(stub, asked) == expected
    assert await answered(stub, asked) == expected
    assert len(engine.salts) == 1
    assert servicer.metrics.registry.get_sample_value("refit_rollout_tokens_total") == 6


async def test_the_id_of_an_ended_request_is_not_anothers(
    stub: rollout_pb2_grpc.RolloutServiceStub, engine: FakeEngine
) -> None:
    """faults.md 24, SkyRL#2035: one id, one request, one effect."""
    await answered(stub, request(request_id="one"))
    assert await refused(stub, request(request_id="one", max_tokens=4)) == (
        grpc.StatusCode.ALREADY_EXISTS,
        "request_id: 'one' ended and was another request; choose another",
    )
    assert len(engine.salts) == 1


async def test_a_request_without_an_id_is_always_a_new_one(
    stub: rollout_pb2_grpc.RolloutServiceStub, engine: FakeEngine
) -> None:
    assert await answered(stub, request()) == await answered(stub, request())
    assert len(engine.salts) == 2


async def test_a_cancelled_request_is_forgotten(
    stub: rollout_pb2_grpc.RolloutServiceStub, engine: FakeEngine
) -> None:
    """faults.md 24: what counted nowhere is sampled when it is sent again."""
    asked = request(request_id="one")
    engine.gate.clear()
    call = stub.Generate(asked, timeout=5)
    await eventually(lambda: engine.running)
    call.cancel()
    await eventually(lambda: not engine.running)
    engine.gate.set()
    assert [list(message.token_ids) for message in await answered(stub, asked)] == [
        [65],
        [66],
        [67],
    ]
    assert len(engine.salts) == 2


async def test_the_answer_is_kept_for_a_caller_that_lost_its_end(
    servicer: RolloutServicer, engine: FakeEngine
) -> None:
    """faults.md 24: the connection broke under the last message, and the request comes again."""
    asked = request(request_id="one", max_tokens=1)
    context: Any = NoDeadline()
    broken = servicer.Generate(asked, context)
    await anext(broken)
    await broken.aclose()
    again = [message async for message in servicer.Generate(asked, context)]
    assert [list(message.token_ids) for message in again] == [[65]]
    assert len(engine.salts) == 1


class NoDeadline:
    """All of a call's context that Generate looks at."""

    def time_remaining(self) -> None:
        return None


async def test_no_more_requests_are_taken_than_fit(
    stub: rollout_pb2_grpc.RolloutServiceStub, engine: FakeEngine
) -> None:
    engine.gate.clear()
    running = [asyncio.ensure_future(answered(stub, request())) for _ in range(4)]
    await eventually(lambda: len(engine.running) == 4)
    code, text = await refused(stub, request())
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert text.startswith("max_requests: 4 requests are running and waiting")
    engine.gate.set()
    assert [len(answer) for answer in await asyncio.gather(*running)] == [3] * 4
    assert len(await answered(stub, request())) == 3


async def test_cancelling_a_call_ends_it_in_the_engine_and_drops_the_pin(
    stub: rollout_pb2_grpc.RolloutServiceStub,
    registry: AdapterRegistry,
    engine: FakeEngine,
    tmp_path: Path,
) -> None:
    await registry.commit(CONTENT, tmp_path / "adapter", source="trainer")
    call = stub.Generate(request(adapter=LATEST, max_tokens=1000, request_id="one"), timeout=5)
    await call.read()
    assert engine.running == {"one"}
    call.cancel()
    await eventually(lambda: not engine.running and not registry._live[0].pins)


async def test_draining_refuses_new_requests_and_waits_for_running_ones(
    stub: rollout_pb2_grpc.RolloutServiceStub, servicer: RolloutServicer, engine: FakeEngine
) -> None:
    call = aiter(stub.Generate(request(), timeout=5))
    await anext(call)
    engine.gate.clear()
    draining = asyncio.create_task(servicer.requests.drain(5))
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
    call = aiter(stub.Generate(asked, timeout=5))
    begun = [await anext(call), await anext(call)]
    engine.gate.clear()
    await servicer.requests.drain(0.05)
    ended = [message async for message in call]
    # Some tokens were made before the gate closed.
    assert {message.finish_reason for message in [*begun, *ended[:-2]]} == {0}
    assert [message.finish_reason for message in ended[-2:]] == [3, 3]
    assert [message.index for message in ended[-2:]] == [0, 1]
    assert [list(message.token_ids) for message in ended[-2:]] == [[], []]
    assert not servicer.answers.recall(asked)


async def test_a_request_that_waits_for_its_version_is_sent_elsewhere_by_a_drain(
    stub: rollout_pb2_grpc.RolloutServiceStub, servicer: RolloutServicer, engine: FakeEngine
) -> None:
    newer = rollout_pb2.AdapterSelector(
        adapter="default", rule=rollout_pb2.VERSION_RULE_AT_LEAST, version=9
    )
    waiting = asyncio.ensure_future(refused(stub, request(adapter=newer)))
    await eventually(lambda: servicer.requests._ids)
    await servicer.requests.drain(0.05)
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
        await servicer.requests.drain(0.05)
        assert engine.running
        await server.stop(0)
        assert (await waiting)[0] is grpc.StatusCode.UNAVAILABLE
        await eventually(lambda: not engine.running)


async def test_a_pause_ends_with_its_lease(
    stub: rollout_pb2_grpc.RolloutServiceStub, engine: FakeEngine
) -> None:
    """faults.md 22: a caller that dies cannot leave the replica paused."""
    await stub.PauseGeneration(rollout_pb2.PauseGenerationRequest(lease_seconds=0.05))
    assert engine.paused
    await eventually(lambda: not engine.paused)


async def test_a_pause_is_renewed_by_the_next_and_ended_by_resume(
    stub: rollout_pb2_grpc.RolloutServiceStub, engine: FakeEngine
) -> None:
    await stub.PauseGeneration(rollout_pb2.PauseGenerationRequest(lease_seconds=0.05))
    await stub.PauseGeneration(rollout_pb2.PauseGenerationRequest(lease_seconds=60))
    await asyncio.sleep(0.1)
    assert engine.paused
    await stub.ResumeGeneration(rollout_pb2.ResumeGenerationRequest())
    assert not engine.paused


@pytest.mark.parametrize("lease_seconds", [0, -1, 601, float("nan")])
async def test_a_pause_needs_a_lease(
    stub: rollout_pb2_grpc.RolloutServiceStub, lease_seconds: float
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.PauseGeneration(rollout_pb2.PauseGenerationRequest(lease_seconds=lease_seconds))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_versions_and_listing_name_what_is_live(
    channel: grpc.aio.Channel,
    stub: rollout_pb2_grpc.RolloutServiceStub,
    registry: AdapterRegistry,
    tmp_path: Path,
) -> None:
    await registry.commit(CONTENT, tmp_path / "adapter", source="trainer")
    listed = await stub.ListAdapters(rollout_pb2.RolloutServiceListAdaptersRequest())
    assert list(listed.adapters) == [ref_to_proto(REF)]
    version_stub = version_pb2_grpc.VersionServiceStub(channel)
    version = await version_stub.GetVersion(version_pb2.GetVersionRequest())
    assert (version.service, version.api_version, version.engine) == ("rollout", "refit.v1", "vllm")
    assert (version.base_model.name, version.base_model.fingerprint) == ("tiny", "f")
    assert list(version.adapters) == [ref_to_proto(REF)]
