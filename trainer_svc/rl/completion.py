"""One sampled answer, as the messages of one or several requests bring it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from refit.v1 import rollout_pb2


@dataclass(slots=True)
class Completion:
    """Token ids, and each one's log-probability under the weights that it was sampled from.

    Completion([9, 8, 7], [-0.1, -0.2, -0.3], "abc", [(3, 2), (4, 1)], FINISH_REASON_STOP)

    was made by version 3 up to its second token and by version 4 after it. `resumed` counts how
    often it had been cut off, and went on from the tokens that it had.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Runs of tokens that one version made: the version and how many, in order."""

    finish_reason: rollout_pb2.FinishReason = rollout_pb2.FINISH_REASON_UNSPECIFIED
    resumed: int = 0

    @property
    def version(self) -> int:
        """The oldest that made any of its tokens; 0 while nothing has come."""
        return min((version for version, _ in self.versions), default=0)

    @property
    def was_cut_off(self) -> bool:
        return self.finish_reason == rollout_pb2.FINISH_REASON_ABORT

    def add(self, part: rollout_pb2.GenerateResponse) -> None:
        """Take the next message of its stream."""
        self._take(part.token_ids, part.logprobs, part.text)
        self._made_by(part.adapter.version, len(part.token_ids))
        self.finish_reason = part.finish_reason

    def resume(self, rest: Completion) -> None:
        """Go on with what was sampled after its tokens."""
        self._take(rest.token_ids, rest.logprobs, rest.text)
        for version, count in rest.versions:
            self._made_by(version, count)
        self.finish_reason = rest.finish_reason
        self.resumed += 1

    def _take(self, token_ids: Iterable[int], logprobs: Iterable[float], text: str) -> None:
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.text += text

    def _made_by(self, version: int, count: int) -> None:
        """A message without tokens says nothing of them, unless none has come at all."""
        last, tokens = self.versions[-1] if self.versions else (version, 0)
        if self.versions and (last == version or not count):
            self.versions[-1] = (last, tokens + count)
        elif self.versions and not tokens:
            self.versions[-1] = (version, count)
        else:
            self.versions.append((version, count))
