"""Staging folders of the living and of the dead."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from rollout_svc.updates.staging import staging_folder

HOLD = """
import sys
from pathlib import Path
from rollout_svc.updates.staging import staging_folder
with staging_folder(Path(sys.argv[1]), "other") as folder:
    (folder / "adapter").write_text("bytes")
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_folder_goes_with_its_block(tmp_path: Path) -> None:
    with staging_folder(tmp_path / "new" / "parent", "mine") as folder:
        (folder / "adapter").write_text("bytes")
    assert list((tmp_path / "new" / "parent").iterdir()) == []


def test_a_killed_replicas_folder_is_freed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    """faults.md 27, AReaL#1385: nothing adds up over restarts."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        with staging_folder(tmp_path, "mine"):
            assert (tmp_path / "other" / "adapter").exists()
        other.send_signal(signal.SIGKILL)
        other.wait(timeout=10)
    assert (tmp_path / "other" / "adapter").exists()

    with staging_folder(tmp_path, "mine"):
        assert not (tmp_path / "other").exists()


def test_a_place_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with (
        pytest.raises(ConfigError, match=r"staging_dir: .*Not a directory"),
        staging_folder(tmp_path / "file" / "below", "mine"),
    ):
        pass
