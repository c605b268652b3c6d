"""A completion as the training process gets it; imports no protobuf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer.

    Completion((72, 105), (-0.1, -0.9), "Hi", versions=((3, 2),), finish_reason="length")

    `logprobs` are natural logarithms, one a token, of the distribution that was sampled from, after
    temperature, top-k, top-p and min-p. `versions` are runs of tokens: the version that made them
    and how many they are. `finish_reason` is "stop" or "length".
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    versions: tuple[tuple[int, int], ...]
    finish_reason: str

    @property
    def version(self) -> int:
        """The oldest that made any of the tokens."""
        return min(version for version, _ in self.versions)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Completion:
        return cls(
            token_ids=tuple(raw["token_ids"]),
            logprobs=tuple(raw["logprobs"]),
            text=raw["text"],
            versions=tuple((version, count) for version, count in raw["versions"]),
            finish_reason=raw["finish_reason"],
        )
