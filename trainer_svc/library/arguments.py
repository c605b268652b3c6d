"""What a caller gave to `AdapterPublisher`, checked before the server sees it."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

from common.errors import ConfigError

_MAX_TOKEN_ID = (1 << 31) - 1


def whole(name: str, value: Any, *, low: int | None = None, high: int | None = None) -> int:
    """A whole number, a numpy one included, in these bounds, or raises `ConfigError`."""
    fits = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if fits and (low is None or value >= low) and (high is None or value <= high):
        return operator.index(value)
    bounds = "" if low is None else f", {low} or more" if high is None else f", {low} to {high}"
    raise ConfigError(f"{name}: found {value!r}; give a whole number{bounds}")


def real(name: str, value: Any) -> float:
    """A finite number, or raises `ConfigError`."""
    fits = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if fits and math.isfinite(value):
        return float(value)
    raise ConfigError(f"{name}: found {value!r}; give a finite number")


def seconds(name: str, value: Any) -> float:
    """A finite time above 0, or raises `ConfigError`."""
    if (found := real(name, value)) > 0:
        return found
    raise ConfigError(f"{name}: found {value!r}; give more than 0 seconds")


def adapter_name(value: Any) -> str:
    """A name that can be sent and logged, or raises `ConfigError`."""
    if isinstance(value, str) and value and value.isprintable():
        return value
    raise ConfigError(
        f"adapter: found {value!r} of type {type(value).__name__}; "
        "give a name of printable characters"
    )


def token_ids(name: str, values: Any) -> list[int]:
    """At least one id that a vocabulary may hold, or raises `ConfigError`."""
    try:
        ids = [operator.index(value) for value in values]
    except TypeError as error:
        raise ConfigError(f"{name}: {error}; give lists of token ids") from error
    if not ids or not all(0 <= token_id <= _MAX_TOKEN_ID for token_id in ids):
        raise ConfigError(f"{name}: found {ids}; give at least one token id, none below 0")
    return ids


def strings(name: str, values: Sequence[str]) -> list[str]:
    """A list of strings, or raises `ConfigError`."""
    if isinstance(values, (list, tuple)) and all(isinstance(value, str) for value in values):
        return list(values)
    raise ConfigError(f"{name}: found {values!r}; give a list of strings")


def one_of(name: str, value: Any, *, words: Sequence[str]) -> str:
    """One of these words, or raises `ConfigError`."""
    if isinstance(value, str) and value in words:
        return value
    raise ConfigError(f"{name}: found {value!r}; give {', '.join(words[:-1])} or {words[-1]}")
