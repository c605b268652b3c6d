from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from trainer_svc.rl.jsonl import read_jsonl


def test_only_a_newline_ends_a_line_and_blank_ones_are_skipped(tmp_path: Path) -> None:
    """U+2028 and U+0085 are plain text in JSON; splitlines() would cut there."""
    file = tmp_path / "data.jsonl"
    file.write_text('\n{"a": "b\u2028c\u0085d"}\r\n \n{"e": 1}', encoding="utf-8", newline="")
    assert read_jsonl(file, field="x") == [(2, {"a": "b\u2028c\u0085d"}), (4, {"e": 1})]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n \n", r"my\.field: .*data\.jsonl is empty"),
        (b'{"a": 1}\n{', r"my\.field: .*data\.jsonl:2: not JSON"),
        (b"[" * 100_000, r"my\.field: .*data\.jsonl:1: not JSON"),
        (b"\n[]", r"my\.field: .*data\.jsonl:2: found a list; give a JSON object"),
        (b'{"a": "\xff"}', r"my\.field: .*data\.jsonl: not UTF-8 at byte 7; save it as UTF-8"),
        (None, r"my\.field: .*data\.jsonl does not exist"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "data.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_jsonl(file, field="my.field")
