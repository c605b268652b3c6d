"""Live progress of a run: a small table on a terminal, one line a step elsewhere."""

from __future__ import annotations

import time
from statistics import fmean
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Row = dict[str, Any]
_BARS = "▁▂▃▄▅▆▇█"
_TREND_STEPS = 40


class Progress:
    """Shows rows of `metrics.jsonl` as they come::

    with Progress(total_steps=24) as progress:
        progress.note("trainer ready")
        progress.show(row)
    """

    def __init__(self, *, total_steps: int, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._total_steps = total_steps
        self._started = time.monotonic()
        self._rows: list[Row] = []
        terminal = self._console.is_terminal and not self._console.options.ascii_only
        # Live asks for the picture twice a second, so that the time goes on between two steps.
        self._live = (
            Live(get_renderable=self._picture, console=self._console, refresh_per_second=2)
            if terminal and not self._console.is_dumb_terminal
            else None
        )

    def show(self, row: Row) -> None:
        """Take a step's row; one for a step already shown replaces it and what followed."""
        self._rows = [old for old in self._rows if old["step"] < row["step"]] + [row]
        if not self._live:
            text = plain_line(
                self._rows, total_steps=self._total_steps, elapsed_seconds=self._elapsed_seconds
            )
            self._console.print(text, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a line that stays, above the table."""
        self._console.print(text, markup=False, soft_wrap=True)

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    @property
    def _elapsed_seconds(self) -> float:
        return time.monotonic() - self._started

    def _picture(self) -> RenderableType:
        return picture(
            self._rows, total_steps=self._total_steps, elapsed_seconds=self._elapsed_seconds
        )


def plain_line(rows: list[Row], *, total_steps: int, elapsed_seconds: float) -> str:
    """The newest row as one line of text."""
    last = rows[-1]
    left = clock(seconds_left(rows, total_steps=total_steps))
    times = f"elapsed {clock(elapsed_seconds)}  left {left}"
    facts = "  ".join(f"{name} {value}" for name, value in _facts(last))
    return f"step {last['step']}/{total_steps}  {facts}  {times}"


def picture(rows: list[Row], *, total_steps: int, elapsed_seconds: float) -> RenderableType:
    """A bar with the times, and under it a table of the newest row with the reward's trend."""
    step = rows[-1]["step"] if rows else 0
    left = clock(seconds_left(rows, total_steps=total_steps))
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(f"step {step}/{total_steps}", style="bold"),
        ProgressBar(total=total_steps, completed=step, width=_TREND_STEPS),
        f"{clock(elapsed_seconds)} elapsed, {left} left",
    )
    if not rows:
        return Group(head, Text("waiting for the first step", style="dim"))
    table = Table.grid(padding=(0, 2))
    trend = sparkline([row["reward_mean"] for row in rows][-_TREND_STEPS:])
    for name, value in _facts(rows[-1]):
        table.add_row(Text(name, style="dim"), f"{value}  {trend}" if name == "reward" else value)
    return Group(head, table)


def sparkline(values: list[float | None]) -> str:
    """One block character a value, from the lowest to the highest of them; a gap is a space."""
    found = [value for value in values if value is not None]
    low, high = (min(found), max(found)) if found else (0.0, 0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if v is None else _BARS[round((v - low) * scale)] for v in values)


def seconds_left(rows: list[Row], *, total_steps: int) -> float | None:
    """Steps left times the mean of the last five steps' time; None before the first step."""
    if not rows:
        return None
    steps_left: int = total_steps - rows[-1]["step"]
    return steps_left * fmean(row["step_seconds"] for row in rows[-5:])


def clock(seconds: float | None) -> str:
    """`m:ss`, or `h:mm:ss` from an hour on; `?` for None."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _facts(row: Row) -> list[tuple[str, str]]:
    return [
        ("reward", _number(row["reward_mean"], ".3f")),
        ("staleness", f"{row['staleness_mean']:.2f} (max {row['staleness_max']})"),
        ("speed", f"{row['tokens_per_second']:.0f} tokens/s"),
        ("update", f"{row['update_seconds'] * 1000:.0f} ms"),
        ("version", f"{row['version']} on {len(row['replicas'])} replica(s)"),
    ]


def _number(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)
