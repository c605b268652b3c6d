"""The task of `refit demo --fast`: write letters.

A random byte-level model does so about every fifth time, and an adapter learns it in ten steps.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from typing import Any

_LETTERS = frozenset(string.ascii_letters)


def prompts(seed: int) -> Iterator[dict[str, Any]]:
    """Endless requests, each with a number below 100 that tells them apart.

    Yields dicts with `messages` (one user turn); the same ones for the same seed.
    """
    rng = random.Random(seed)
    while True:
        text = f"Write some letters, number {rng.randrange(100)}."
        yield {"messages": [{"role": "user", "content": text}]}


def reward(example: dict[str, Any], completion: str) -> float:
    """The share of characters that are ASCII letters, 0 to 1; an empty completion gets 0."""
    return sum(c in _LETTERS for c in completion) / max(len(completion), 1)
