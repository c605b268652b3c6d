"""Checkpoints appear whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import CheckpointFailed
from trainer_svc.megatron.checkpoint_dir import CheckpointDir


def write(directory: CheckpointDir, text: str) -> None:
    directory.begin()
    (directory.partial / "file").write_text(text)


def test_a_publish_that_broke_half_way_is_undone(tmp_path: Path) -> None:
    directory = CheckpointDir(tmp_path / "runs" / "last")
    write(directory, "one")
    directory.publish()
    write(directory, "two")
    # A power cut between the two renames.
    directory.path.rename(tmp_path / "runs" / ".last.old")
    again = CheckpointDir(tmp_path / "runs" / "last")
    again.recover()
    assert (again.path / "file").read_text() == "one"
    write(again, "three")
    again.publish()
    assert (again.path / "file").read_text() == "three"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["last"]


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    directory = CheckpointDir(tmp_path / "file" / "last")
    with pytest.raises(CheckpointFailed, match=r"file/last could not be written \(Not a directory"):
        directory.begin()
