from __future__ import annotations

import pytest
from refit.v1 import rollout_pb2

from common.errors import AlreadyExists
from rollout_svc.generation import answers as answers_module
from rollout_svc.generation.answers import Answers


def asked(request_id: str, *, max_tokens: int = 1) -> rollout_pb2.GenerateRequest:
    return rollout_pb2.GenerateRequest(
        request_id=request_id, sampling=rollout_pb2.SamplingParams(max_tokens=max_tokens)
    )


def answer(text: str) -> list[rollout_pb2.GenerateResponse]:
    return [rollout_pb2.GenerateResponse(index=index, text=text) for index in range(2)]


def test_an_answer_is_the_requests_and_no_others() -> None:
    answers = Answers()
    assert answers.recall(asked("one")) == []
    answers.remember(asked("one"), answer("first"))
    answers.remember(asked("two"), answer("second"))
    assert answers.recall(asked("one")) == answer("first")
    assert answers.recall(asked("two")) == answer("second")
    with pytest.raises(AlreadyExists, match="'one' ended and was another request"):
        answers.recall(asked("one", max_tokens=2))


def test_the_oldest_answers_are_forgotten_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """faults.md 27: memory levels off over hundreds of requests."""
    monkeypatch.setattr(answers_module, "_MAX_BYTES", 10_000)
    answers = Answers()
    for number in range(300):
        answers.remember(asked(str(number)), answer("x" * 200))
    kept = [number for number in range(300) if answers.recall(asked(str(number)))]
    # 512 an entry, 3 of its id, 203 and 205 of its messages.
    assert kept == list(range(300 - 10_000 // (512 + 3 + 203 + 205), 300))
    assert answers._size_bytes == sum(entry.size_bytes for entry in answers._kept.values())


def test_an_answer_above_the_limit_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_module, "_MAX_BYTES", 10_000)
    answers = Answers()
    answers.remember(asked("small"), answer("first"))
    before = answers._size_bytes
    answers.remember(asked("one"), answer("x" * 10_000))
    assert answers.recall(asked("one")) == []
    assert answers.recall(asked("small")) == answer("first")
    assert answers._size_bytes == before
