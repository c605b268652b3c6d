"""How a replica takes a version over: what becomes of running requests, and where it is served."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from refit.v1 import adapter_pb2

from common.errors import InvalidField


class Swap(enum.Enum):
    """What becomes of requests in flight when another version of their adapter is committed."""

    FINISH = "finish"
    """They end on the version they began with."""

    ABORT = "abort"
    """They end at once with the tokens they have."""

    CONTINUE = "continue"
    """They go on under the new weights; each token says which made it."""


class Merge(enum.Enum):
    """How the factors of an adapter are served."""

    NEVER = "never"
    """In a LoRA slot."""

    ROLLOUT = "rollout"
    """Summed into the engine's own weights."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules that go with an update; None leaves one to the replica."""

    swap: Swap | None = None
    merge: Merge | None = None


_SWAPS = {
    Swap.FINISH: adapter_pb2.SWAP_RULE_FINISH,
    Swap.ABORT: adapter_pb2.SWAP_RULE_ABORT,
    Swap.CONTINUE: adapter_pb2.SWAP_RULE_CONTINUE,
}
_MERGES = {
    Merge.NEVER: adapter_pb2.MERGE_RULE_NEVER,
    Merge.ROLLOUT: adapter_pb2.MERGE_RULE_ROLLOUT,
}


def swap_to_proto(swap: Swap | None) -> adapter_pb2.SwapRule:
    return _SWAPS[swap] if swap else adapter_pb2.SWAP_RULE_UNSPECIFIED


def merge_to_proto(merge: Merge | None) -> adapter_pb2.MergeRule:
    return _MERGES[merge] if merge else adapter_pb2.MERGE_RULE_UNSPECIFIED


def swap_from_proto(number: int, *, field: str) -> Swap | None:
    """Raises `InvalidField`: none that this version knows."""
    if number == adapter_pb2.SWAP_RULE_UNSPECIFIED:
        return None
    for swap, known in _SWAPS.items():
        if known == number:
            return swap
    raise InvalidField(f"{field}: {number}; use finish, abort or continue")


def merge_from_proto(number: int, *, field: str) -> Merge | None:
    """Raises `InvalidField`: none that this version knows."""
    if number == adapter_pb2.MERGE_RULE_UNSPECIFIED:
        return None
    for merge, known in _MERGES.items():
        if known == number:
            return merge
    raise InvalidField(f"{field}: {number}; use never or rollout")
