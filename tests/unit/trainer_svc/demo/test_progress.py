from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from tests.rows import row
from trainer_svc.demo.progress import Progress, clock, plain_line, seconds_left, sparkline


def test_plain_line() -> None:
    rows = [row(step) for step in (1, 2, 3)]
    assert plain_line(rows, total_steps=24, elapsed_seconds=70.0) == (
        "step 3/24  reward 0.300  staleness 0.25 (max 1)  speed 118 tokens/s  update 60 ms"
        "  version 4 on 2 replica(s)  elapsed 1:10  left 2:48"
    )


def test_one_line_a_step_when_output_is_no_terminal() -> None:
    out = io.StringIO()
    with Progress(total_steps=2, console=Console(file=out)) as progress:
        progress.note("trainer ready [2 ranks]")
        progress.show(row(1))
        progress.show(row(2))
    note, first, second = out.getvalue().splitlines()
    assert note == "trainer ready [2 ranks]"
    assert first.startswith("step 1/2  reward 0.100")
    assert second.startswith("step 2/2  reward 0.200")


def test_table_on_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    with Progress(total_steps=4, console=console) as progress:
        for step in (1, 2, 3):
            progress.show(row(step))
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).split("\r")[-1]
    assert "step 3/4" in last
    assert "0.300  ▁▅█" in last
    assert "0:08 left" in last


def test_a_step_made_again_replaces_what_followed() -> None:
    out = io.StringIO()
    progress = Progress(total_steps=9, console=Console(file=out))
    for step in (1, 2, 3):
        progress.show(row(step))
    progress.show(row(2, step_seconds=1.0))
    assert out.getvalue().splitlines()[-1].startswith("step 2/9  reward 0.200")
    assert out.getvalue().splitlines()[-1].endswith("left 0:32")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([0.5, 0.5], "▁▁"),
        ([0.0, 0.5, 1.0], "▁▅█"),
        ([0.0, None, 1.0], "▁ █"),
        ([None], " "),
    ],
)
def test_sparkline(values: list[float | None], expected: str) -> None:
    assert sparkline(values) == expected


def test_seconds_left_follows_the_last_five_steps() -> None:
    rows = [row(1, step_seconds=100.0), *(row(step, step_seconds=2.0) for step in range(2, 7))]
    assert seconds_left(rows, total_steps=10) == 8.0
    assert seconds_left([], total_steps=10) is None


@pytest.mark.parametrize(
    ("seconds", "expected"), [(None, "?"), (0.4, "0:00"), (59.6, "1:00"), (3725.0, "1:02:05")]
)
def test_clock(seconds: float | None, expected: str) -> None:
    assert clock(seconds) == expected
