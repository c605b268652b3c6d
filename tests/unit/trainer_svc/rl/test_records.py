from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from tests.rows import row
from trainer_svc.rl.records import Records, read_rows


@contextmanager
def opened(run_dir: Path) -> Iterator[Records]:
    with closing(Records(run_dir)) as records:
        yield records


def steps(run_dir: Path) -> list[int]:
    return [found["step"] for found in read_rows(run_dir / "metrics.jsonl")]


def events(run_dir: Path) -> list[Any]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    files = sorted(run_dir.glob("events.out.tfevents.*"))
    return [event for file in files for event in EventFileLoader(str(file)).Load()]


def test_a_row_is_on_disk_at_once(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as records:
        records.append(row(1))
        [found] = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert found.pop("wall_seconds") >= 0
    assert found == row(1)


def test_not_finite_numbers_are_null(tmp_path: Path) -> None:
    with opened(tmp_path) as records:
        records.append(row(1, loss=math.nan, kl=-math.inf))
    text = (tmp_path / "metrics.jsonl").read_text()
    assert '"loss": null' in text
    assert '"kl": null' in text
    assert "NaN" not in text


def test_resume_cuts_what_will_be_made_again(tmp_path: Path) -> None:
    with opened(tmp_path) as records:
        for step in range(1, 6):
            records.append(row(step))
    with opened(tmp_path) as records:
        records.truncate(3)
        assert steps(tmp_path) == [1, 2, 3]
        records.append(row(4, reward_mean=0.75))
        assert [found["reward_mean"] for found in records.rows] == [0.1, 0.2, 0.3, 0.75]
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_truncate_without_rows(tmp_path: Path) -> None:
    with opened(tmp_path) as records:
        records.truncate(0)
        records.append(row(1))
    assert steps(tmp_path) == [1]


def test_wall_time_goes_on_from_the_last_session(tmp_path: Path) -> None:
    line = json.dumps(row(1, wall_seconds=1000.0))
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with opened(tmp_path) as records:
        assert 1000 < records.wall_seconds < 1060


def test_half_a_line_at_the_end_is_dropped(tmp_path: Path) -> None:
    whole = json.dumps(row(1, wall_seconds=3.0)) + "\n"
    (tmp_path / "metrics.jsonl").write_text(whole + '{"step": 2, "ver')
    with opened(tmp_path) as records:
        records.truncate(1)
    assert (tmp_path / "metrics.jsonl").read_text() == whole


def test_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nrubbish\n{"step": 3}\n')
    with pytest.raises(ConfigError) as caught:
        Records(tmp_path)
    assert str(caught.value) == (
        f"{path}:2: not JSON: Expecting value: line 1 column 1 (char 0); repair or remove the file"
    )


def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    with opened(tmp_path) as records:
        records.append(row(1))
        records.append(row(2, loss=math.nan))
    first, second = (event for event in events(tmp_path) if event.HasField("summary"))
    assert (first.step, second.step) == (1, 2)
    tags = [value.tag for value in first.summary.value]
    assert "reward_mean" in tags
    assert not {"step", "digest", "replicas"} & set(tags)
    assert "loss" not in [value.tag for value in second.summary.value]


def test_tensorboard_is_told_of_a_rewind(tmp_path: Path) -> None:
    with opened(tmp_path) as records:
        records.append(row(1))
        records.append(row(2))
        records.truncate(1)
    last = events(tmp_path)[-1]
    assert last.step == 2
    assert last.session_log.status == last.session_log.START


def test_summary(tmp_path: Path) -> None:
    with opened(tmp_path) as records:
        for step in range(1, 8):
            records.append(row(step, update_seconds=step / 100))
        records.append(row(8, samples=24, samples_lost=8, replicas=[], update_seconds=0.5))
        summary = records.summarise()
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert summary.pop("wall_seconds") >= 0
    assert summary.pop("reward_first5") == pytest.approx(0.3)
    assert summary.pop("reward_last5") == pytest.approx(0.6)
    assert summary == {
        "steps": 8,
        "versions": 8,
        "versions_verified": 7,
        "samples": 248,
        "samples_lost": 8,
        "update_seconds_p50": pytest.approx(0.045),
    }


def test_records_load_neither_torch_nor_tensorflow(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from trainer_svc.rl.records import Records\n"
        f"Records(Path({str(tmp_path)!r})).close()\n"
        "print([name for name in ('torch', 'tensorflow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
