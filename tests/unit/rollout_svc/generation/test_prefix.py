"""Answers that go on from what an aborted one had."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from refit.v1 import rollout_pb2, rollout_pb2_grpc

from tests.fake_engine import FakeEngine
from tests.generating import answered, refused, request, sampled


async def test_an_aborted_answer_goes_on_where_it_ended(
    stub: rollout_pb2_grpc.RolloutServiceStub, engine: FakeEngine
) -> None:
    """Only new tokens are sent; the prompt is the request's alone."""
    whole = await answered(stub, request(max_tokens=7))
    engine.one_step = True
    call = aiter(stub.Generate(request(max_tokens=7, request_id="one"), timeout=5))
    begun = [await anext(call)]
    await engine.abort("one")
    begun += [message async for message in call]
    assert begun[-1].finish_reason == rollout_pb2.FINISH_REASON_ABORT
    engine.one_step = False
    engine.gate.set()
    rest = await answered(stub, request(max_tokens=7, prefix=tuple(sampled(begun))))
    assert sampled(begun) == [65]
    assert sampled(begun) + sampled(rest) == sampled(whole)
    assert list(rest[0].prompt_token_ids) == [65, 66, 67]
    assert rest[-1].finish_reason == rollout_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"prefix": (1, 2, 3)}, "prefix_token_ids: 3 tokens with max_tokens 3, which counts them"),
        ({"prefix": (100,)}, "prefix_token_ids: 100; the model's token ids are 0 to 99"),
        ({"prefix": (-1,)}, "prefix_token_ids: -1; the model's token ids are 0 to 99"),
        (
            {"prefix": (1,) * 13, "max_tokens": 14},
            "prefix_token_ids: 13 tokens behind a prompt of 3; the model's context of 16",
        ),
        ({"n": 2}, "prefix_token_ids: with n 2"),
        ({"presence_penalty": 1.0}, "prefix_token_ids: with sampling.presence_penalty"),
        ({"frequency_penalty": 1.0}, "prefix_token_ids: with sampling.frequency_penalty"),
        ({"repetition_penalty": 1.5}, "prefix_token_ids: with sampling.repetition_penalty"),
        ({"bad_words": ["a"]}, "prefix_token_ids: with sampling.bad_words"),
        ({"regex": "a"}, "prefix_token_ids: with sampling.regex"),
        ({"prompt_logprobs": 0}, "prefix_token_ids: with sampling.prompt_logprobs"),
    ],
)
async def test_a_prefix_that_could_not_go_on_is_refused(
    stub: rollout_pb2_grpc.RolloutServiceStub,
    engine: FakeEngine,
    change: dict[str, Any],
    text: str,
) -> None:
    code, details = await refused(stub, request(**{"prefix": (1,), **change}))
    assert (code, details[: len(text)]) == (grpc.StatusCode.INVALID_ARGUMENT, text)
    assert not engine.generations


async def test_a_prefix_fills_the_context_up_to_one_token(
    stub: rollout_pb2_grpc.RolloutServiceStub,
) -> None:
    assert len(sampled(await answered(stub, request(prefix=(1,) * 12, max_tokens=13)))) == 1
