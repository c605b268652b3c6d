"""Which version made which token, whatever the messages are like."""

from __future__ import annotations

import pytest
from refit.v1 import rollout_pb2, version_pb2

from trainer_svc.rl.completion import Completion

STOP, ABORT = rollout_pb2.FINISH_REASON_STOP, rollout_pb2.FINISH_REASON_ABORT


def _made(*messages: tuple[int, int]) -> Completion:
    """Of these messages' versions and numbers of tokens."""
    completion = Completion()
    for version, count in messages:
        completion.add(
            rollout_pb2.GenerateResponse(
                token_ids=[version] * count, adapter=version_pb2.AdapterRef(version=version)
            )
        )
    return completion


@pytest.mark.parametrize(
    ("messages", "runs", "oldest"),
    [
        ([], [], 0),
        ([(3, 2)], [(3, 2)], 3),
        ([(3, 2), (3, 1)], [(3, 3)], 3),
        ([(3, 2), (4, 1), (4, 2), (5, 1)], [(3, 2), (4, 3), (5, 1)], 3),
        ([(4, 2), (3, 1), (4, 1)], [(4, 2), (3, 1), (4, 1)], 3),
        ([(3, 2), (4, 0)], [(3, 2)], 3),
        ([(3, 0)], [(3, 0)], 3),
        ([(3, 0), (4, 2)], [(4, 2)], 4),
    ],
)
def test_runs_of_tokens_by_version(
    messages: list[tuple[int, int]], runs: list[tuple[int, int]], oldest: int
) -> None:
    """A message without tokens made none: it counts only where nothing else has come."""
    completion = _made(*messages)
    assert (completion.versions, completion.version) == (runs, oldest)


def test_what_goes_on_ends_as_its_rest_does() -> None:
    completion, rest = _made((3, 2)), _made((3, 1), (4, 1))
    completion.finish_reason, rest.finish_reason = ABORT, STOP
    completion.text, rest.text = "a b", " c"
    assert completion.was_cut_off
    completion.resume(rest)

    expected = Completion([3, 3, 3, 4], [], "a b c", [(3, 3), (4, 1)], STOP, resumed=1)
    assert completion == expected
    assert not completion.was_cut_off
