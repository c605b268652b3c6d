from __future__ import annotations

from pathlib import Path

from trainer_svc.demo.row_reader import RowReader


def test_rows_come_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = RowReader(path)
    assert reader.new_rows() == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert reader.new_rows() == [{"step": 1}, {"step": 2}]
    assert reader.new_rows() == []
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert reader.new_rows() == [{"step": 3}]


def test_rows_come_again_after_a_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    reader = RowReader(path)
    reader.new_rows()
    path.write_text('{"step": 1}\n')
    assert reader.new_rows() == [{"step": 1}]
