from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from trainer_svc.demo.finished_dir import MODEL_FILES, filling, is_model


def write_model(directory: Path, *, text: str = "") -> None:
    for name in MODEL_FILES:
        (directory / name).write_text(text)


def test_directory_appears_when_it_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "models" / "tiny"
    with filling(out) as work:
        write_model(work)
        (work / "config.json").chmod(0o600)
        assert not out.exists()
    assert is_model(out)
    assert [path.name for path in out.parent.iterdir()] == ["tiny"]
    assert out.stat().st_mode & 0o777 == 0o755
    assert (out / "config.json").stat().st_mode & 0o777 == 0o644


def test_nothing_is_left_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="half-way"), filling(tmp_path / "tiny") as work:
        (work / "config.json").touch()
        raise RuntimeError("half-way")
    assert list(tmp_path.iterdir()) == []


def test_empty_directory_is_filled(tmp_path: Path) -> None:
    out = tmp_path / "tiny"
    out.mkdir()
    with filling(out) as work:
        write_model(work)
    assert is_model(out)


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_something_else_is_never_replaced(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "tiny"
    if kind == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError) as caught, filling(out):
        pass
    assert str(caught.value) == (
        f"model directory: {out} exists and is no complete model; remove it or name another"
    )
    assert out.exists()


def test_the_first_of_two_to_finish_wins(tmp_path: Path) -> None:
    out = tmp_path / "tiny"
    with filling(out) as slow:
        write_model(slow, text="slow")
        with filling(out) as quick:
            write_model(quick, text="quick")
    assert (out / "config.json").read_text() == "quick"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
