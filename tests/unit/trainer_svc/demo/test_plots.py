from __future__ import annotations

from pathlib import Path

import pytest

from tests.rows import row
from trainer_svc.demo.plots import reward_png


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_writes_a_png(tmp_path: Path, num_steps: int) -> None:
    path = tmp_path / "reward.png"
    rows = [row(step) for step in range(1, num_steps + 1)]
    assert reward_png(rows, path) == path
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_gap_where_a_number_was_not_finite(tmp_path: Path) -> None:
    path = reward_png([row(1), row(2, mismatch=None), row(3)], tmp_path / "reward.png")
    assert path.stat().st_size > 10_000
