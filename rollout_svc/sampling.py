"""Sampling parameters, checked field by field where they arrive."""

from __future__ import annotations

import math
from dataclasses import dataclass

from refit.v1 import rollout_pb2

from common.errors import InvalidField


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample `n` completions; None leaves a value to the engine's own default."""

    n: int
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0


_OPTIONAL = ("temperature", "top_p", "top_k", "min_p", "seed")
_MAX_N = 1024


def sampling_from_proto(msg: rollout_pb2.SamplingParams, *, n: int) -> Sampling:
    """Check every field; `n` 0 means 1.

    Raises:
        InvalidField: names the field, what was found and what it may be.
    """
    sampling = Sampling(
        n=n or 1,
        max_tokens=msg.max_tokens,
        stop=tuple(msg.stop),
        stop_token_ids=tuple(msg.stop_token_ids),
        ignore_eos=msg.ignore_eos,
        min_tokens=msg.min_tokens,
        **{name: getattr(msg, name) for name in _OPTIONAL if msg.HasField(name)},
    )
    _check_counts(sampling)
    _check_distribution(sampling)
    return sampling


def _check_counts(sampling: Sampling) -> None:
    if not 1 <= sampling.n <= _MAX_N:
        raise InvalidField(f"n: {sampling.n}; ask for 1 to {_MAX_N} completions")
    if sampling.max_tokens < 1:
        raise InvalidField(f"sampling.max_tokens: {sampling.max_tokens}; it must be at least 1")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise InvalidField(
            f"sampling.min_tokens: {sampling.min_tokens}; it must lie between 0 and max_tokens "
            f"({sampling.max_tokens})"
        )
    if "" in sampling.stop:
        raise InvalidField("sampling.stop: an empty string stops everything; leave it out")
    if min(sampling.stop_token_ids, default=0) < 0:
        raise InvalidField(
            f"sampling.stop_token_ids: {min(sampling.stop_token_ids)}; token ids begin at 0"
        )


def _check_distribution(sampling: Sampling) -> None:
    _within("temperature", sampling.temperature, 0.0, 2.0)
    _within("min_p", sampling.min_p, 0.0, 1.0)
    _within("top_p", sampling.top_p, 0.0, 1.0)
    if sampling.top_p == 0.0:
        raise InvalidField("sampling.top_p: 0.0 leaves no token; it must be above 0")
    if sampling.top_k is not None and sampling.top_k < 0:
        raise InvalidField(f"sampling.top_k: {sampling.top_k}; give 0 for none, or 1 and more")
    if sampling.seed is not None and sampling.seed < 0:
        raise InvalidField(f"sampling.seed: {sampling.seed}; a seed is at least 0")


def _within(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not (math.isfinite(value) and low <= value <= high):
        raise InvalidField(f"sampling.{name}: {value}; it must lie between {low} and {high}")
