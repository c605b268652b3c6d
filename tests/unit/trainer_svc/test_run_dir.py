"""A run's books across restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError, Incompatible
from trainer_svc.run_dir import RunDir


def test_a_resumed_run_keeps_its_id_and_never_uses_a_version_twice(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", base_fingerprint="f")
    assert [run.spend_version(), run.spend_version()] == [1, 2]
    run.close()

    resumed = RunDir.resume(tmp_path / "run", base_fingerprint="f")

    assert resumed.run_id == run.run_id
    assert resumed.spend_version() == 3


def test_two_runs_have_two_ids(tmp_path: Path) -> None:
    one, other = (RunDir.create(tmp_path / name, base_fingerprint="f") for name in "ab")

    assert one.run_id != other.run_id


def test_a_new_run_never_lands_on_an_old_one(tmp_path: Path) -> None:
    RunDir.create(tmp_path, base_fingerprint="f").spend_version()

    with pytest.raises(ConfigError, match="--resume"):
        RunDir.create(tmp_path, base_fingerprint="f")


def test_a_start_that_failed_before_its_first_version_leaves_no_run(tmp_path: Path) -> None:
    RunDir.create(tmp_path, base_fingerprint="f").close()

    assert RunDir.create(tmp_path, base_fingerprint="f").spend_version() == 1


def test_two_trainers_never_share_a_directory(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, base_fingerprint="f")
    run.spend_version()

    with pytest.raises(ConfigError, match="in use by a running trainer"):
        RunDir.resume(tmp_path, base_fingerprint="f")


def test_resuming_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        RunDir.resume(tmp_path, base_fingerprint="f")


def test_the_newest_finished_checkpoint_counts(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, base_fingerprint="f")
    assert run.last_checkpoint() is None
    for step in (9, 10):
        run.checkpoint(step).mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step-000011.partial").mkdir()

    assert run.last_checkpoint() == (run.checkpoint(10), 10)


def test_a_run_is_never_resumed_on_another_base_model(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, base_fingerprint="f")
    run.spend_version()
    run.close()

    with pytest.raises(Incompatible, match=r"fingerprint is g, .* begun on f"):
        RunDir.resume(tmp_path, base_fingerprint="g")


def test_damaged_books_are_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("")

    with pytest.raises(ConfigError, match=r"run\.json is damaged"):
        RunDir.resume(tmp_path, base_fingerprint="f")


def test_a_folder_with_somebodys_adapter_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()

    with pytest.raises(ConfigError, match="holds adapter"):
        RunDir.create(tmp_path, base_fingerprint="f")
