from __future__ import annotations

import pytest
from google.protobuf.message import Message
from refit.v1 import rollout_pb2

from common.errors import InvalidField
from rollout_svc.generation.unknown_fields import refuse_unknown_fields
from tests.generating import LATEST, request

# Field 1000, a varint, and its value.
UNKNOWN = b"\xc0\x3e\x01"


def known() -> rollout_pb2.GenerateRequest:
    asked = request(adapter=LATEST, logit_bias={1: 1.0}, choice=rollout_pb2.Choices(texts=["a"]))
    asked.chat.messages.add(role="user", content="hi")
    asked.chat.messages.add(role="user", content="ho")
    return asked


def test_what_is_known_passes() -> None:
    refuse_unknown_fields(known())
    refuse_unknown_fields(request(prefix=(1, 2)))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ((), "GenerateRequest"),
        (("sampling",), "SamplingParams"),
        (("sampling", "choice"), "Choices"),
        (("adapter",), "AdapterSelector"),
        (("chat", "messages", 1), "ChatMessage"),
    ],
)
def test_an_unknown_field_is_refused_wherever_it_is(path: tuple[str | int, ...], name: str) -> None:
    """faults.md 10: an unknown knob is an error, not dropped."""
    asked = known()
    inner: Message = asked
    for step in path:
        inner = inner[step] if isinstance(step, int) else getattr(inner, step)  # type: ignore[index]
    inner.MergeFromString(UNKNOWN)
    with pytest.raises(InvalidField, match=rf"^{name}: .* no field of number 1000; "):
        refuse_unknown_fields(asked)
