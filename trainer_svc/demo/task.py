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
    """0.5 for the right first number, 0.5 for saying nothing else, 0.1 for any bare number.

    So 1.0 is a bare right answer, 0.5 one in a sentence, 0.1 a bare wrong one, and 0 the rest.
    """
    text = completion.strip()
    first = _NUMBER.search(text)
    right = first is not None and (first.group().lstrip("0") or "0") == example["answer"]
    if text == example["answer"]:
        return 1.0
    return 0.5 * right + 0.1 * (_NUMBER.fullmatch(text) is not None)
