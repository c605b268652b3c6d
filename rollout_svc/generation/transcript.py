"""All that a request has been answered so far."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from common.adapter import AdapterRef
from rollout_svc.engine import FinishReason, TokenDelta, TopTokens

Part: TypeAlias = "tuple[TokenDelta, AdapterRef | None]"
"""Tokens of a completion, and the version that made them; None is the base model."""


@dataclass(slots=True)
class Transcript:
    """Deltas, each joined to those before of the same completion and the same version.

    Args:
        completions: how many there will be.
    """

    completions: int
    _runs: dict[int, list[_Run]] = field(default_factory=dict)

    def add(self, delta: TokenDelta, ref: AdapterRef | None) -> None:
        """Take the next tokens of a completion; `ref` made them."""
        runs = self._runs.setdefault(delta.index, [])
        if not runs or (runs[-1].ref != ref and delta.token_ids):
            runs.append(_Run(ref))
        runs[-1].add(delta)

    @property
    def is_whole(self) -> bool:
        """Whether every completion came to its own end."""
        ends = [runs[-1].finish_reason for runs in self._runs.values()]
        return len(ends) == self.completions and not {None, FinishReason.ABORT} & set(ends)

    def joined(self) -> Iterator[Part]:
        """Of every completion in turn, one delta for each version that made a part of it."""
        for index in sorted(self._runs):
            yield from self.completion(index)

    def completion(self, index: int) -> Iterator[Part]:
        """Of one completion, in order."""
        return ((run.joined(index), run.ref) for run in self._runs[index])


@dataclass(slots=True)
class _Run:
    ref: AdapterRef | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopTokens] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, delta: TokenDelta) -> None:
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.top += delta.top
        self.texts.append(delta.text)
        self.finish_reason = delta.finish_reason

    def joined(self, index: int) -> TokenDelta:
        return TokenDelta(
            index=index,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            text="".join(self.texts),
            finish_reason=self.finish_reason,
            top=tuple(self.top),
        )
