"""The real services as child processes, for tests that are not asynchronous themselves."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

START_SECONDS = 120


@contextlib.contextmanager
def refit(
    *arguments: str, settings: Mapping[str, object] | None = None, log: Path
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`refit ARGUMENTS --config FILE`: the process and the address it listens on."""
    options = []
    if settings is not None:
        file = log.with_suffix(".toml")
        file.write_text(_toml(settings))
        options = ["--config", str(file)]
    with log.open("a") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "common.cli", *arguments, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "listening on" in line:
                yield process, line.split()[-1]
                break
        else:
            raise AssertionError(f"{arguments} ended:\n{log.read_text()[-3000:]}")
    finally:
        if process.poll() is None:
            process.terminate()
        assert process.stdout is not None
        process.stdout.close()
        process.wait(timeout=60)


def _toml(settings: Mapping[str, object]) -> str:
    """Dotted keys and plain values; paths as text."""
    return "".join(f"{key} = {json.dumps(value, default=str)}\n" for key, value in settings.items())


def grpcurl(*arguments: str, timeout_seconds: float = 20) -> str:
    """Output of the real grpcurl; an answer other than OK raises CalledProcessError."""
    command = [str(Path(sys.executable).parent / "grpcurl"), "-plaintext", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=timeout_seconds
    )
    return done.stdout


def rows_until(path: Path, *, count: int, seconds: float) -> list[str]:
    """The lines of a growing file, once there are so many."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= count:
            return lines
        time.sleep(0.05)
    raise AssertionError(f"{path} has fewer than {count} lines after {seconds} s")
