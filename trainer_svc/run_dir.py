"""A run's directory: its identity, the version numbers it has spent, its checkpoints."""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from pathlib import Path
from typing import IO

from common.errors import ConfigError

_BOOKS = "run.json"
_CHECKPOINTS = "checkpoints"
_LOCK = ".lock"


class RunDir:
    """Open with `create` for a new run and with `resume` to go on with an old one.

    Either raises `ConfigError` while another trainer has the directory open.
    """

    def __init__(self, path: Path, *, run_id: str, last_version: int) -> None:
        self.path = path
        self.run_id = run_id
        self._last_version = last_version
        self._lock = _locked(path)

    @classmethod
    def create(cls, path: Path) -> RunDir:
        """Raises `ConfigError` when a run, which begins with its first version, lives there."""
        if (path / _BOOKS).exists():
            raise ConfigError(
                f"run_dir: {path} holds a run; continue it with --resume or choose another"
            )
        path.mkdir(parents=True, exist_ok=True)
        return cls(path, run_id=uuid.uuid4().hex[:12], last_version=0)

    @classmethod
    def resume(cls, path: Path) -> RunDir:
        """Raises `ConfigError` when no run lives there."""
        try:
            books = json.loads((path / _BOOKS).read_text())
        except FileNotFoundError as error:
            raise ConfigError(f"run_dir: {path} holds no run to --resume") from error
        return cls(path, run_id=books["run_id"], last_version=books["last_version"])

    def close(self) -> None:
        """Let others open it."""
        self._lock.close()

    def spend_version(self) -> int:
        """The next version number, written down before anyone can see it.

        A number is used once, whatever happens: after a crash the run goes on above the last one
        spent, not above the last one in a checkpoint, since replicas may hold what came between.
        """
        self._last_version += 1
        self._write()
        return self._last_version

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint after `step` optimizer steps goes."""
        return self.path / _CHECKPOINTS / f"step-{step:06d}"

    def last_checkpoint(self) -> tuple[Path, int] | None:
        """The newest finished checkpoint and its step."""
        found = sorted((self.path / _CHECKPOINTS).glob("step-??????"))
        return (found[-1], int(found[-1].name.removeprefix("step-"))) if found else None

    def _write(self) -> None:
        text = json.dumps({"run_id": self.run_id, "last_version": self._last_version})
        temporary = self.path / f"{_BOOKS}.new"
        temporary.write_text(text)
        os.replace(temporary, self.path / _BOOKS)


def _locked(path: Path) -> IO[str]:
    """The directory's lock, which goes with the process."""
    lock = (path / _LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ConfigError(
            f"run_dir: {path} is in use by a running trainer; stop it or choose another"
        ) from error
    return lock
