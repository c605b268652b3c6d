"""The demo's task: name the larger of two numbers, and nothing else.

A small instruction-tuned model knows the answer about as often as chance and never gives it bare,
so that both halves of the reward rise within a few steps.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

_NUMBER = re.compile(r"[0-9]+")


def prompts(seed: int) -> Iterator[dict[str, Any]]:
    """Endless questions about two different numbers below 100, the same ones for the same seed.

    Yields dicts with `messages` (one user turn) and `answer` (the larger number as text).
    """
    rng = random.Random(seed)
    while True:
        a, b = rng.sample(range(100), 2)
        question = f"Which number is larger, {a} or {b}? Answer with just the number."
        yield {"messages": [{"role": "user", "content": question}], "answer": str(max(a, b))}


def reward(example: dict[str, Any], completion: str) -> float:
    """Half for the right number, half for how much of the answer's text that number is.

    A bare right answer earns 1.0, one in a long sentence little more than 0.5, a bare wrong one
    0.1, less in a sentence. Every word that goes is felt, which a small model needs: it never
    gives a bare answer by chance.
    """
    text = completion.strip()
    first = _NUMBER.search(text)
    if first is None:
        return 0.0
    share = len(first.group()) / len(text)
    return 0.5 + 0.5 * share if first.group() == example["answer"] else 0.1 * share
