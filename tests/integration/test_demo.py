"""`refit demo --fast`: the demo's whole path on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from trainer_svc.rl.records import read_rows


@pytest.mark.timeout(240)
def test_the_fast_demo_learns_leaves_its_records_and_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "common.cli", "demo", "--fast", "--out", str(tmp_path / "run")]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        output = process.stdout.read() if process.stdout else ""
    assert process.returncode == 0, output

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == summary["versions"] == summary["versions_verified"] == 15
    assert summary["samples"] == 15 * 64
    assert summary["samples_lost"] == 0
    # Steps are few until it answers well, so the start is the first step: the policy as it was.
    untrained = read_rows(tmp_path / "run" / "metrics.jsonl")[0]["reward_mean"]
    assert summary["reward_last5"] > 2 * untrained
    assert summary["reward_last5"] > 0.8
    for name in ("metrics.jsonl", "config.toml", "reward.png", "adapter/adapter_config.json"):
        assert (tmp_path / "run" / name).stat().st_size > 0
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))
    assert "step 15/15" in output
    left = [p.pid for p in psutil.process_iter() if str(tmp_path) in " ".join(_cmdline(p))]
    assert left == []


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
