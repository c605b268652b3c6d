"""A run's books across restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from trainer_svc.run_dir import RunDir


def test_a_resumed_run_keeps_its_id_and_never_uses_a_version_twice(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    assert [run.spend_version(), run.spend_version()] == [1, 2]
    run.close()

    resumed = RunDir.resume(tmp_path / "run")

    assert resumed.run_id == run.run_id
    assert resumed.spend_version() == 3


def test_two_runs_have_two_ids(tmp_path: Path) -> None:
    assert RunDir.create(tmp_path / "a").run_id != RunDir.create(tmp_path / "b").run_id


def test_a_new_run_never_lands_on_an_old_one(tmp_path: Path) -> None:
    RunDir.create(tmp_path).spend_version()

    with pytest.raises(ConfigError, match="--resume"):
        RunDir.create(tmp_path)


def test_a_start_that_failed_before_its_first_version_leaves_no_run(tmp_path: Path) -> None:
    RunDir.create(tmp_path).close()

    assert RunDir.create(tmp_path).spend_version() == 1


def test_two_trainers_never_share_a_directory(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path)
    run.spend_version()

    with pytest.raises(ConfigError, match="in use by a running trainer"):
        RunDir.resume(tmp_path)


def test_resuming_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        RunDir.resume(tmp_path)


def test_the_newest_finished_checkpoint_counts(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path)
    assert run.last_checkpoint() is None
    for step in (9, 10):
        run.checkpoint(step).mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step-000011.partial").mkdir()

    assert run.last_checkpoint() == (run.checkpoint(10), 10)
