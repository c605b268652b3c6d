"""The command line: quick help, and mistakes as one line."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from common.cli import main
from common.version import DISTRIBUTION, service_version

COMMAND = [str(Path(sys.executable).parent / "refit")]


@pytest.mark.parametrize("arguments", [[], ["trainer"], ["rollout"], ["publish"], ["demo"]])
def test_help_answers_in_under_a_second(arguments: list[str]) -> None:
    """In processor time, which other work on the machine does not stretch."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [*COMMAND, *arguments, "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)

    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
    assert done.stdout.startswith("usage: refit")


def test_version_names_what_refit_runs_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0

    lines = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines[DISTRIBUTION] == service_version()
    assert lines["megatron-core"] == "0.16.1"


MISTAKES = {
    "no model": (["trainer", "--set", "run_dir=r"], "model: missing"),
    "typo": (
        ["rollout", "--set", "model=m", "--set", "trainer_adress=x:1"],
        "unknown key 'trainer_adress'; did you mean 'trainer_address'?",
    ),
    "nested typo": (
        ["trainer", "--set", "lora.rnk=3"],
        "--set: unknown key 'lora.rnk'; did you mean 'lora.rank'?",
    ),
    "alpha": (["trainer", "--set", "lora.alpha=0"], "lora.alpha: found 0; "),
    "no value": (["rollout", "--set", "model"], "--set: found 'model'; write it as KEY=VALUE"),
    "no such model": (
        ["rollout", "--set", "model=/no/such/directory"],
        "model: /no/such/directory is no directory; give a Hugging Face model directory",
    ),
    "publish": (["publish", "/nowhere", "--model", "m"], "PEFT_DIR: /nowhere is no directory"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_and_ends_with_status_1(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, expected = MISTAKES[name]

    assert main(arguments) == 1

    assert expected in capsys.readouterr().err
