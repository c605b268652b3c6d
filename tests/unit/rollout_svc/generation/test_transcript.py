from __future__ import annotations

from dataclasses import replace

from rollout_svc.engine import FinishReason, TokenDelta
from rollout_svc.generation.transcript import Transcript
from tests.adapters import make_adapter, make_ref

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
FIRST = make_ref(make_adapter()[0])
SECOND = replace(FIRST, version=2)


def test_deltas_join_to_one_a_completion() -> None:
    transcript = Transcript(2)
    deltas = [
        TokenDelta(1, (4,), (-0.4,), "d", None, top=(((4, -0.4),),)),
        TokenDelta(0, (1, 2), (-0.1, -0.2), "ab", None),
        TokenDelta(1, (5,), (-0.5,), "e", STOP, top=(((6, -0.1),),)),
        TokenDelta(0, (), (), "", LENGTH),
    ]
    whole = []
    for delta in deltas:
        transcript.add(delta, FIRST)
        whole.append(transcript.is_whole)
    assert whole == [False, False, False, True]
    assert list(transcript.joined()) == [
        (TokenDelta(0, (1, 2), (-0.1, -0.2), "ab", LENGTH), FIRST),
        (
            TokenDelta(1, (4, 5), (-0.4, -0.5), "de", STOP, top=(((4, -0.4),), ((6, -0.1),))),
            FIRST,
        ),
    ]


def test_a_completion_that_went_on_under_another_version_is_a_delta_for_each() -> None:
    """An end without tokens belongs to whoever made the last of them."""
    transcript = Transcript(1)
    transcript.add(TokenDelta(0, (1,), (-0.1,), "a", None), FIRST)
    transcript.add(TokenDelta(0, (2,), (-0.2,), "b", None), SECOND)
    transcript.add(TokenDelta(0, (3,), (-0.3,), "c", None), SECOND)
    transcript.add(TokenDelta(0, (), (), "", STOP), FIRST)
    assert transcript.is_whole
    assert list(transcript.joined()) == [
        (TokenDelta(0, (1,), (-0.1,), "a", None), FIRST),
        (TokenDelta(0, (2, 3), (-0.2, -0.3), "bc", STOP), SECOND),
    ]


def test_the_base_and_a_version_are_two() -> None:
    transcript = Transcript(1)
    transcript.add(TokenDelta(0, (1,), (-0.1,), "a", None), None)
    transcript.add(TokenDelta(0, (2,), (-0.2,), "b", LENGTH), FIRST)
    assert [ref for _, ref in transcript.joined()] == [None, FIRST]


def test_an_aborted_completion_makes_no_whole_answer() -> None:
    transcript = Transcript(2)
    for end in (TokenDelta(0, (1,), (-0.1,), "a", STOP), TokenDelta(1, (), (), "", ABORT)):
        transcript.add(end, None)
        assert not transcript.is_whole
