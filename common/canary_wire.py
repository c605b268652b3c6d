"""A canary as its message and back."""

from __future__ import annotations

from refit.v1 import adapter_pb2

from common.adapter import Canary, CanarySequence
from common.errors import InvalidField


def canary_to_proto(canary: Canary) -> adapter_pb2.Canary:
    return adapter_pb2.Canary(
        sequences=[
            adapter_pb2.CanarySequence(token_ids=s.token_ids, logprobs=s.logprobs)
            for s in canary.sequences
        ],
        max_difference=canary.max_difference,
    )


def canary_from_proto(msg: adapter_pb2.Canary) -> Canary:
    """Raises `InvalidField` where it cannot be scored."""
    if not 0 < msg.max_difference < float("inf"):
        raise InvalidField(
            f"manifest.canary.max_difference: {msg.max_difference}; it must be above 0 and finite"
        )
    for sequence in msg.sequences:
        if len(sequence.token_ids) < 2 or len(sequence.logprobs) != len(sequence.token_ids) - 1:
            raise InvalidField(
                f"manifest.canary: {len(sequence.token_ids)} token_ids with "
                f"{len(sequence.logprobs)} logprobs; give at least two, and a logprob for each "
                "but the first"
            )
    if not msg.sequences:
        raise InvalidField("manifest.canary.sequences: empty; leave the canary out instead")
    sequences = tuple(CanarySequence(tuple(s.token_ids), tuple(s.logprobs)) for s in msg.sequences)
    return Canary(sequences, msg.max_difference)
