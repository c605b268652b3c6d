"""A short run of the fuzzer, in a process of its own: it limits its memory."""

from __future__ import annotations

import subprocess
import sys

SECONDS = 60


def test_three_thousand_mutated_streams_change_nothing_they_should_not() -> None:
    """faults.md 4, 22, 25 and 26: whatever comes, only whole and verified versions are served."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.fuzz_stream", "--streams", "3000", "--seed", "3"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("3000 streams in ")
