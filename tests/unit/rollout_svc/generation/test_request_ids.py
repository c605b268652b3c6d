"""One id, one request, one effect: over a real gRPC server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
from refit.v1 import rollout_pb2, rollout_pb2_grpc

from common.rules import Rules, Swap
from common.stream.content import Content
from common.wire import ref_to_proto
from rollout_svc.service import RolloutServicer
from rollout_svc.versions.registry import AdapterRegistry
from tests.adapters import make_adapter, make_ref
from tests.eventually import eventually
from tests.fake_engine import FakeEngine
from tests.generating import LATEST, answered, refused, request

MANIFEST, BUFFER = make_adapter()
REF = make_ref(MANIFEST)
CONTENT = Content.whole(REF, MANIFEST, BUFFER)


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
    assert registry.versions.all[0].pins == 0
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
    assert servicer.generator.metrics.registry.get_sample_value("refit_rollout_tokens_total") == 6


async def test_an_answer_that_went_on_under_a_newer_version_is_remembered_so(
    stub: rollout_pb2_grpc.RolloutServiceStub,
    registry: AdapterRegistry,
    engine: FakeEngine,
    tmp_path: Path,
) -> None:
    """faults.md 24: each token is still the version's that made it when the answer comes again."""
    await registry.commit(CONTENT, tmp_path / "first", source="trainer")
    newer = make_ref(MANIFEST, version=2)
    content = Content.whole(newer, MANIFEST, BUFFER, rules=Rules(swap=Swap.CONTINUE))
    engine.one_step = True
    asked = request(adapter=LATEST, request_id="one", max_tokens=3)
    call = aiter(stub.Generate(asked, timeout=5))
    came = [await anext(call)]
    await registry.commit(content, tmp_path / "second", source="trainer")
    engine.one_step = False
    engine.gate.set()
    came += [message async for message in call]
    assert [message.adapter.version for message in came] == [1, 2, 2]
    again = await answered(stub, asked)
    assert [(list(part.token_ids), part.adapter.version) for part in again] == [
        ([65], 1),
        ([66, 67], 2),
    ]
    assert [part.finish_reason for part in again] == [0, 2]
    assert len(engine.generations) == 1


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
