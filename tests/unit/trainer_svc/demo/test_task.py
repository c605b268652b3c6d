from __future__ import annotations

import itertools

import pytest

from trainer_svc.demo import fast_task, task


def test_prompts_are_the_same_for_the_same_seed() -> None:
    first, again = (list(itertools.islice(task.prompts(7), 50)) for _ in range(2))
    assert first == again
    assert first != list(itertools.islice(task.prompts(8), 50))


def test_prompt_asks_for_the_larger_of_two_numbers() -> None:
    for example in itertools.islice(task.prompts(0), 200):
        [message] = example["messages"]
        words = message["content"].replace(",", "").replace("?", "").split()
        a, b = int(words[4]), int(words[6])
        assert a != b
        assert 0 <= min(a, b) < max(a, b) < 100
        assert message == {
            "role": "user",
            "content": f"Which number is larger, {a} or {b}? Answer with just the number.",
        }
        assert example["answer"] == str(max(a, b))


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("42", 1.0),
        (" 42\n", 1.0),
        ("42.", 0.5 + 0.5 * 2 / 3),
        ("The larger number is 42, not 17.", 0.5 + 0.5 * 2 / 32),
        ("042", 0.1),
        ("17", 0.1),
        ("9" * 5000, 0.1),
        ("Between 17 and 42 it is 42", 0.1 * 2 / 26),
        ("4 2", 0.1 / 3),
        ("٤٢", 0.0),
        ("", 0.0),
    ],
)
def test_reward(completion: str, expected: float) -> None:
    assert task.reward({"answer": "42"}, completion) == expected


def test_fast_prompts_are_the_same_for_the_same_seed() -> None:
    first, again = (list(itertools.islice(fast_task.prompts(3), 20)) for _ in range(2))
    assert first == again
    assert first != list(itertools.islice(fast_task.prompts(4), 20))


@pytest.mark.parametrize(
    ("completion", "expected"),
    [("abYZ", 1.0), ("a1b2", 0.5), ("\ufffd\ufffd\ufffdx", 0.25), ("é9 ", 0.0), ("", 0.0)],
)
def test_fast_reward(completion: str, expected: float) -> None:
    assert fast_task.reward({}, completion) == expected
