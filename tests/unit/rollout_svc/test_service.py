"""The servicers behind a real gRPC server, with an engine that needs no model."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest
from refit.v1 import rollout_pb2, rollout_pb2_grpc, version_pb2, version_pb2_grpc

from common.stream.content import Content
from common.wire import ref_to_proto
from rollout_svc.service import RolloutServicer
from rollout_svc.versions.registry import AdapterRegistry
from tests.adapters import make_adapter, make_ref
from tests.eventually import eventually
from tests.fake_engine import FakeEngine
from tests.generating import BASE, LATEST, answered, failed, refused, request, sampled

MANIFEST, BUFFER = make_adapter()
REF = make_ref(MANIFEST)
CONTENT = Content.whole(REF, MANIFEST, BUFFER)


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
    assert [salt.rpartition("-")[0] for salt in engine.salts] == [
        f"default@1-{REF.digest.hex()[:16]}"
    ]


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


async def test_no_more_requests_are_taken_than_fit(
    stub: rollout_pb2_grpc.RolloutServiceStub, engine: FakeEngine
) -> None:
    engine.gate.clear()
    running = [asyncio.ensure_future(answered(stub, request())) for _ in range(4)]
    await eventually(lambda: len(engine.running) == 4)
    error = await failed(stub, request())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (error.details() or "").startswith("max_requests: 4 requests are running and waiting")
    assert ("grpc-retry-pushback-ms", "1000") in tuple(error.trailing_metadata())
    engine.gate.set()
    assert [len(answer) for answer in await asyncio.gather(*running)] == [3] * 4
    assert len(await answered(stub, request())) == 3


async def test_other_refusals_name_no_time_to_come_again(
    stub: rollout_pb2_grpc.RolloutServiceStub,
) -> None:
    error = await failed(stub, request(max_tokens=0))
    assert "grpc-retry-pushback-ms" not in dict(error.trailing_metadata())


async def test_with_final_only_each_completion_comes_once(
    stub: rollout_pb2_grpc.RolloutServiceStub, engine: FakeEngine
) -> None:
    asked = request(n=2, final_only=True, top_logprobs=1, prompt_logprobs=0)
    first, second = await answered(stub, asked)
    assert [first.index, second.index] == [0, 1]
    assert [list(first.token_ids), list(second.token_ids)] == [[65, 66, 67], [66, 67, 65]]
    assert (first.text, second.text) == ("ABC", "BCA")
    assert [first.finish_reason, second.finish_reason] == [2, 2]
    assert [list(top.token_ids) for top in first.top_logprobs] == [[0]] * 3
    assert (list(first.prompt_token_ids), list(second.prompt_token_ids)) == ([65, 66, 67], [])
    assert (list(first.prompt_logprobs), list(second.prompt_logprobs)) == ([-0.5, -0.5], [])
    assert engine.generations[0].final_only


async def test_an_abort_shows_what_a_final_only_completion_has(
    stub: rollout_pb2_grpc.RolloutServiceStub, engine: FakeEngine
) -> None:
    engine.one_step = True
    asked = request(final_only=True, request_id="one", max_tokens=9)
    running = asyncio.ensure_future(answered(stub, asked))
    await eventually(lambda: engine.running and not engine.gate.is_set())
    await engine.abort("one")
    (message,) = await running
    assert (list(message.token_ids), message.finish_reason) == ([65], 3)


async def test_likely_tokens_and_the_prompts_scores_come_as_asked(
    stub: rollout_pb2_grpc.RolloutServiceStub,
) -> None:
    """The prompt's with the first message; one fewer than it has tokens."""
    answer = await answered(stub, request(max_tokens=2, top_logprobs=2, prompt_logprobs=1))
    assert [
        [(list(top.token_ids), list(top.logprobs)) for top in message.top_logprobs]
        for message in answer
    ] == [[([0, 1], [-0.5, -1.5])]] * 2
    assert [list(message.prompt_logprobs) for message in answer] == [[-0.5, -0.5], []]
    assert [len(message.prompt_top_logprobs) for message in answer] == [2, 0]
    assert list(answer[0].prompt_top_logprobs[0].token_ids) == [0]


async def test_a_prompt_alone_is_scored_in_one_message(
    stub: rollout_pb2_grpc.RolloutServiceStub,
) -> None:
    (message,) = await answered(stub, request(max_tokens=0, prompt_logprobs=0))
    assert list(message.prompt_logprobs) == [-0.5, -0.5]
    assert (list(message.token_ids), message.finish_reason) == ([], 2)
    assert list(message.prompt_token_ids) == [65, 66, 67]


async def test_an_unknown_field_is_refused(stub: rollout_pb2_grpc.RolloutServiceStub) -> None:
    """faults.md 10: an unknown knob is an error, not dropped."""
    asked = request()
    asked.sampling.MergeFromString(b"\xc0\x3e\x01")
    code, text = await refused(stub, asked)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text.startswith("SamplingParams: this replica knows no field of number 1000")


async def test_an_engine_that_dies_leaves_no_caller_waiting(
    stub: rollout_pb2_grpc.RolloutServiceStub, engine: FakeEngine
) -> None:
    """faults.md 23: requests of a dead engine are told at once, and can go elsewhere."""
    engine.one_step = True
    call = aiter(stub.Generate(request(max_tokens=9), timeout=5))
    assert sampled([await anext(call)]) == [65]
    engine.kill()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (await refused(stub, request()))[0] is grpc.StatusCode.UNAVAILABLE


async def test_cancelling_a_call_ends_it_in_the_engine_and_drops_the_pin(
    stub: rollout_pb2_grpc.RolloutServiceStub,
    registry: AdapterRegistry,
    engine: FakeEngine,
    tmp_path: Path,
) -> None:
    await registry.commit(CONTENT, tmp_path / "adapter", source="trainer")
    engine.one_step = True
    call = stub.Generate(request(adapter=LATEST, max_tokens=1000, request_id="one"), timeout=5)
    await call.read()
    assert engine.running == {"one"}
    call.cancel()
    await eventually(lambda: not engine.running and not registry.versions.all[0].pins)


async def test_a_client_that_does_not_read_keeps_no_version_from_ending(
    servicer: RolloutServicer, registry: AdapterRegistry, engine: FakeEngine, tmp_path: Path
) -> None:
    """Or updates would wait for it."""
    await registry.commit(CONTENT, tmp_path / "adapter", source="trainer")
    asked = request(adapter=LATEST, max_tokens=1000)
    async with aclosing(servicer.generator.answer(asked, wait_seconds=5)) as messages:
        await anext(messages)
        await eventually(lambda: not registry.versions.all[0].pins)
        assert not engine.running
        assert len([message async for message in messages]) == 999


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
    assert (version.base_model.name, version.base_model.fingerprint) == ("tiny", "base")
    assert list(version.adapters) == [ref_to_proto(REF)]
