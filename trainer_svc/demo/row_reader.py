"""New rows of a `metrics.jsonl` that another process is writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class RowReader:
    """Remembers how far it has read; call `new_rows` again and again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset_bytes = 0

    def new_rows(self) -> list[dict[str, Any]]:
        """Rows written since the last call; none while there is no file.

        A line that is still being written waits for the next call. After the writer cut its file
        short, every row comes again.
        """
        if not self._path.is_file():
            return []
        if self._path.stat().st_size < self._offset_bytes:
            self._offset_bytes = 0
        with self._path.open("rb") as file:
            file.seek(self._offset_bytes)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset_bytes += len(complete)
        return [json.loads(line) for line in complete.splitlines()]
