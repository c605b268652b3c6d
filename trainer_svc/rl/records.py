"""A run's records: `metrics.jsonl`, TensorBoard event files, and `summary.json` at the end."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from trainer_svc.rl.event_log import EventLog
from trainer_svc.rl.summary import summarise

METRICS_NAME = "metrics.jsonl"
SUMMARY_NAME = "summary.json"


class Records:
    """Keeps one row a step, in memory and on disk.

    Opening a directory that has rows goes on from them::

        with contextlib.closing(Records(run_dir)) as records:
            records.truncate(step)  # the checkpoint's step: later rows will be made again
            records.append({"step": step + 1, ...})
            records.summarise()
    """

    def __init__(self, run_dir: Path) -> None:
        """Read the rows of an earlier session.

        Raises:
            ConfigError: `metrics.jsonl` is damaged.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        self._path = run_dir / METRICS_NAME
        self.rows = read_rows(self._path)
        self._earlier_seconds = _wall_seconds(self.rows)
        self._started = time.monotonic()
        self._events = EventLog(run_dir)

    def append(self, row: dict[str, Any]) -> None:
        """Record one step. `wall_seconds`, the run's age without its downtime, is added.

        A number that is not finite is written as null, which JSON can say.
        """
        row = {key: _jsonable(value) for key, value in row.items()}
        row["wall_seconds"] = self.wall_seconds
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        scalars = {
            key: float(value)
            for key, value in row.items()
            if isinstance(value, int | float) and key != "step"
        }
        self._events.scalars(scalars, step=row["step"])

    def truncate(self, step: int) -> None:
        """Cut the rows after `step`, the last one that still counts (0: all of them)."""
        self.rows = [row for row in self.rows if row["step"] <= step]
        scratch = self._path.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        os.replace(scratch, self._path)
        self._events.rewind(step)

    @property
    def wall_seconds(self) -> float:
        """How long the run has been going, all sessions together."""
        return self._earlier_seconds + time.monotonic() - self._started

    def summarise(self) -> dict[str, Any]:
        """Write `summary.json` and return what it says."""
        summary = summarise(self.rows, wall_seconds=self.wall_seconds)
        (self._run_dir / SUMMARY_NAME).write_text(json.dumps(summary, indent=2) + "\n")
        return summary

    def close(self) -> None:
        self._events.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`; none when there is no file.

    A last line without its end, which a killed process leaves, is not counted.

    Raises:
        ConfigError: another line is not JSON.
    """
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{path}:{number}: not JSON: {error}; repair or remove the file"
            ) from error
    return rows


def _wall_seconds(rows: list[dict[str, Any]]) -> float:
    return float(rows[-1]["wall_seconds"]) if rows else 0.0


def _jsonable(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
