"""What is asked of the fleet: a group's completions, or the rest of one that was cut off."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from blake3 import blake3
from refit.v1 import rollout_pb2

from trainer_svc.fleet import Replica
from trainer_svc.rl.completion import Completion

AGAIN_SECONDS = 1.0
"""Pause before a replica that did not answer is asked again, unless it said another one."""

_SEED_BYTES = 4


@dataclass(slots=True)
class Question:
    """A request that replicas are tried with, one after the other, until one has answered it.

    Times are the event loop's.
    """

    request: rollout_pb2.GenerateRequest
    deadline: float
    asking: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    failures: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, Replica] = field(default_factory=dict)
    hedged: bool = False
    sent: asyncio.Event = field(default_factory=asyncio.Event)
    _rests: dict[str, float] = field(default_factory=dict)
    """Until when a replica is not asked again."""

    @property
    def version(self) -> int:
        return self.request.adapter.version

    def left_seconds(self) -> float:
        return self.deadline - asyncio.get_running_loop().time()

    def rest(self, replica: Replica, seconds: float = AGAIN_SECONDS) -> None:
        """Ask the others meanwhile."""
        self._rests[replica.id] = asyncio.get_running_loop().time() + seconds

    def avoided(self) -> frozenset[str]:
        """Replicas that are not to be asked now."""
        now = asyncio.get_running_loop().time()
        return frozenset(self.asking.union(r for r, until in self._rests.items() if until > now))

    def pause_seconds(self) -> float:
        """How long to wait for a replica before looking at all of them again."""
        now = asyncio.get_running_loop().time()
        ends = (until for until in self._rests.values() if until > now)
        return min(self.deadline - now, AGAIN_SECONDS, min(ends, default=self.deadline) - now)

    def why(self) -> str:
        return "".join(f"; {name}: {reason}" for name, reason in sorted(self.failures.items()))

    @contextlib.contextmanager
    def put_to(self, replica: Replica) -> Iterator[None]:
        self.hedged |= bool(self.asking)
        self.asking.add(replica.id)
        self.asked.add(replica.id)
        self.sent.set()
        try:
            yield
        finally:
            self.asking.discard(replica.id)

    def rest_of(self, completion: Completion, *, index: int) -> Question:
        """What is missing of completion `index`, which was cut off.

        The id follows from the group's, the index and the tokens: the same rest asked for twice is
        one request, and that of another completion, or after other tokens, is another.
        """
        request = rollout_pb2.GenerateRequest()
        request.CopyFrom(self.request)
        request.n = 1
        request.prefix_token_ids[:] = completion.token_ids
        digest = blake3(f"{index} {completion.token_ids}".encode())
        request.request_id += f"-{index}-{digest.hexdigest()[:16]}"
        if request.sampling.HasField("seed"):
            # With the group's own seed every rest would draw what the first tokens were drawn with.
            digest.update(f" {request.sampling.seed}".encode())
            request.sampling.seed = int.from_bytes(digest.digest()[:_SEED_BYTES], "little")
        return Question(request, self.deadline)
