"""Answers that ended whole, kept to be given again under the same request id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from blake3 import blake3
from refit.v1 import rollout_pb2

from common.errors import AlreadyExists

_MAX_BYTES = 64 << 20
# What Python keeps beside an answer's own bytes, about.
_ENTRY_BYTES = 512


@dataclass(frozen=True, slots=True)
class _Kept:
    request_digest: bytes
    messages: tuple[bytes, ...]
    size_bytes: int


@dataclass(slots=True)
class Answers:
    """The newest whole answers by request id, 64 MiB of them."""

    _kept: dict[str, _Kept] = field(default_factory=dict)
    _size_bytes: int = 0

    def recall(self, request: rollout_pb2.GenerateRequest) -> list[rollout_pb2.GenerateResponse]:
        """The answer that this very request had; empty when none is remembered.

        Raises:
            AlreadyExists: its id belonged to another request.
        """
        kept = self._kept.get(request.request_id)
        if kept is None:
            return []
        if kept.request_digest != _digest(request):
            raise AlreadyExists(
                f"request_id: {request.request_id!r} ended and was another request; choose another"
            )
        return [rollout_pb2.GenerateResponse.FromString(message) for message in kept.messages]

    def remember(
        self,
        request: rollout_pb2.GenerateRequest,
        answer: Sequence[rollout_pb2.GenerateResponse],
    ) -> None:
        """Keep a whole answer under its request's id, and forget the oldest above the limit.

        One that is above it alone is not kept.
        """
        messages = tuple(message.SerializeToString() for message in answer)
        size_bytes = _ENTRY_BYTES + len(request.request_id) + sum(map(len, messages))
        if size_bytes > _MAX_BYTES:
            return
        self._kept[request.request_id] = _Kept(_digest(request), messages, size_bytes)
        self._size_bytes += size_bytes
        while self._size_bytes > _MAX_BYTES:
            self._size_bytes -= self._kept.pop(next(iter(self._kept))).size_bytes


def _digest(request: rollout_pb2.GenerateRequest) -> bytes:
    return blake3(request.SerializeToString(deterministic=True)).digest()
