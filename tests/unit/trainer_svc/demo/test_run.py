from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from trainer_svc.demo.run import _make_room


def test_a_directory_with_other_files_is_never_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()

    with pytest.raises(ConfigError, match=r"--out: .* holds other files"):
        _make_room(tmp_path)

    assert (tmp_path / "thesis").is_dir()


def test_an_earlier_demos_records_make_room(tmp_path: Path) -> None:
    (tmp_path / "trainer.log").write_text("")
    (tmp_path / "metrics.jsonl").write_text("")

    _make_room(tmp_path)

    assert list(tmp_path.iterdir()) == []
