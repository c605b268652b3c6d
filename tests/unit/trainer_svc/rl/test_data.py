"""Examples and reward functions by name."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from trainer_svc.rl.data import load_examples, load_function, skip


def _take(source: str, *, seed: int, count: int) -> list[Any]:
    return [e["prompt"] for e in itertools.islice(load_examples(source, seed=seed), count)]


def test_a_jsonl_file_is_shuffled_by_seed_and_repeats(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(f'{{"prompt": {n}}}\n' for n in range(10)))

    found = _take(str(file), seed=3, count=20)

    assert sorted(found[:10]) == sorted(found[10:]) == list(range(10))
    assert found == _take(str(file), seed=3, count=20)
    assert found != _take(str(file), seed=4, count=20)


def test_skipping_goes_on_where_a_run_stopped(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": 1}\n{"prompt": 2}\n{"prompt": 3}\n')
    whole = _take(str(file), seed=0, count=9)

    rest = itertools.islice(skip(load_examples(str(file), seed=0), 4), 5)

    assert [example["prompt"] for example in rest] == whole[4:]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ('\n{"prompt": "a\u2028b\u0085c"}\n\n{', r"data\.jsonl:4: not JSON"),
        ('{"prompt": 1}\r\n\r\n[]\r\n', r"data\.jsonl:3: found a list; give a JSON object"),
        ("{", r"data\.jsonl:1: not JSON"),
        ('{"prompt": 1}\n{"text": 1}', r"data\.jsonl:2: needs a `messages` or a `prompt` key"),
    ],
)
def test_a_bad_file_is_refused_naming_the_line(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(text, encoding="utf-8", newline="")

    with pytest.raises(ConfigError, match=expected):
        load_examples(str(file), seed=0)


def test_only_a_newline_ends_a_line_and_blank_ones_are_skipped(tmp_path: Path) -> None:
    """U+2028, U+2029 and U+0085 are plain text in JSON; splitlines() would cut there."""
    file = tmp_path / "data.jsonl"
    text = "a\u2028b\u2029c\u0085d"
    file.write_text(f'\n{{"prompt": "{text}"}}\r\n \n{{"prompt": "e"}}', encoding="utf-8")

    assert sorted(_take(str(file), seed=0, count=2)) == [text, "e"]


def test_a_file_that_is_not_utf8_is_refused_at_the_byte(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'{"prompt": "\xff"}')

    with pytest.raises(ConfigError, match=r"data\.jsonl: not UTF-8 at byte 12; save it as UTF-8"):
        load_examples(str(file), seed=0)


def test_a_function_is_found_by_name() -> None:
    assert load_function("math:floor", field="rl.reward")(2.5) == 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("math", "write it as module:function"),
        ("no_such_module:f", "rl.reward: 'no_such_module:f': No module named"),
        ("math:flor", "did you mean 'floor'"),
        ("math:pi", "math has no function 'pi'"),
    ],
)
def test_a_function_that_is_not_there_is_named(name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_function(name, field="rl.reward")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from math import nothing\n", "cannot import name 'nothing' from 'math'"),
        ("def reward(:\n", r"invalid syntax \(broken.*\.py, line 1\)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    (tmp_path / f"broken_{len(text)}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"rl\.reward: 'broken_{len(text)}:reward': {expected}"):
        load_function(f"broken_{len(text)}:reward", field="rl.reward")
