"""What is known of one subscriber's stream."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from refit.v1 import adapter_pb2

from common.adapter import AdapterRef

_LEAST_MEASURED_BYTES = 1 << 20
"""Smaller updates measure round trips, not the link."""


@dataclass(frozen=True, slots=True)
class Parent:
    """A relay that a subscriber takes bytes from."""

    replica_id: str
    address: str


@dataclass(slots=True, eq=False)
class Subscription:
    """One subscriber's stream; `held` is what the replica itself says it has."""

    wanted: frozenset[str] = frozenset()
    held: frozenset[AdapterRef] = frozenset()
    encodings: frozenset[adapter_pb2.Encoding] = frozenset()
    parent: Parent | None = None
    partial: tuple[AdapterRef, int] | None = None
    needs_base: bool = False
    """The base's weights go first."""

    ended: str = ""
    """Why the stream has to end."""

    link_bytes_per_second: float = float("inf")
    sent: dict[str, AdapterRef] = field(default_factory=dict)
    """The last version of each adapter that was sent."""

    sending_since: float | None = None
    """On the event loop's clock: when the message was ready that the replica has not taken yet."""

    def wants(self, adapter: str) -> bool:
        return not self.wanted or adapter in self.wanted

    def lacks(self, ref: AdapterRef) -> bool:
        """Whether this version is wanted, not held, and was not sent."""
        known = ref in self.held or self.sent.get(ref.adapter) == ref
        return self.wants(ref.adapter) and not known

    def stalled_seconds(self) -> float:
        """How long the replica has not taken the next message; 0 where there is none."""
        if self.sending_since is None:
            return 0.0
        return asyncio.get_running_loop().time() - self.sending_since

    def measured(self, *, wire_bytes: int, wire_seconds: float) -> None:
        """Learn the link's speed from an update whose bytes were sent as they are."""
        if wire_bytes >= _LEAST_MEASURED_BYTES and wire_seconds > 0:
            self.link_bytes_per_second = wire_bytes / wire_seconds
