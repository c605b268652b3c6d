"""JSONL files, with errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.errors import ConfigError


def read_jsonl(path: Path, *, field: str) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a file, each with the number of its line; blank lines are skipped.

    Args:
        field: the setting that named the file.

    Raises:
        ConfigError: no such file, no UTF-8, no object in it, or a line that is none.
    """
    if not path.is_file():
        raise ConfigError(f"{field}: {path} does not exist; give a JSONL file")
    try:
        # Not read_text, which makes a lone "\r" a line of its own.
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{field}: {path}: not UTF-8 at byte {error.start}; save it as UTF-8"
        ) from error
    # Not splitlines, which cuts at U+2028 and others that are plain text in JSON.
    lines = enumerate(text.split("\n"), 1)
    found = [
        (number, _object(line, where=f"{field}: {path}:{number}"))
        for number, line in lines
        if line.strip()
    ]
    if not found:
        raise ConfigError(f"{field}: {path} is empty; give one JSON object a line")
    return found


def _object(line: str, *, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: found a {type(value).__name__}; give a JSON object")
    return value
