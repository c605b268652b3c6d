"""A run's directory: its identity, the version numbers it has spent, its checkpoints."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from pathlib import Path
from typing import IO

from common.errors import ConfigError, Incompatible

_BOOKS = "run.json"
_CHECKPOINTS = "checkpoints"
_LOCK = ".lock"
ADAPTER_DIR = "adapter"
"""The last checkpoint's adapter, put where users look for it."""
WARM_START_DIR = "warm_start"
"""What supervised training before the first step left."""


class RunDir:
    """Open with `create` for a new run and with `resume` to go on with an old one.

    Either raises `ConfigError` while another trainer has the directory open.
    """

    def __init__(
        self, path: Path, *, run_id: str, base_fingerprint: str, last_version: int
    ) -> None:
        self.path = path
        self.run_id = run_id
        self._base_fingerprint = base_fingerprint
        self._last_version = last_version
        self._lock = _locked(path)

    @classmethod
    def create(cls, path: Path, *, base_fingerprint: str) -> RunDir:
        """Raises `ConfigError` when a run, which begins with its first version, lives there."""
        for name in (_BOOKS, _CHECKPOINTS, ADAPTER_DIR):
            if (path / name).exists():
                raise ConfigError(
                    f"run_dir: {path} holds {name}; continue that run with --resume, or choose "
                    "another directory"
                )
        path.mkdir(parents=True, exist_ok=True)
        # Of a run that ended before it had a version.
        shutil.rmtree(path / WARM_START_DIR, ignore_errors=True)
        run_id = uuid.uuid4().hex[:12]
        return cls(path, run_id=run_id, base_fingerprint=base_fingerprint, last_version=0)

    @classmethod
    def resume(cls, path: Path, *, base_fingerprint: str) -> RunDir:
        """Go on with the run that lives there.

        Raises:
            ConfigError: none does, or its books are damaged.
            Incompatible: it was begun on another base model.
        """
        try:
            books = json.loads((path / _BOOKS).read_text())
        except FileNotFoundError as error:
            raise ConfigError(f"run_dir: {path} holds no run to --resume") from error
        except json.JSONDecodeError as error:
            raise ConfigError(f"run_dir: {path / _BOOKS} is damaged: {error}") from error
        if books["base_fingerprint"] != base_fingerprint:
            raise Incompatible(
                f"model: its fingerprint is {base_fingerprint}, the run in {path} was begun on "
                f"{books['base_fingerprint']}; give that model"
            )
        return cls(path, **books)

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

    def drop_old_checkpoints(self, keep: int) -> None:
        """Remove all but the newest `keep`, and what a dead run left half-written. Call it when one
        has just been saved: before, the newest may be among the latter."""
        below = self.path / _CHECKPOINTS
        for path in (*sorted(below.glob("step-??????"))[:-keep], *below.glob(".step-*")):
            shutil.rmtree(path, ignore_errors=True)

    def _write(self) -> None:
        """On disk before it returns: what a power cut forgets would be spent twice."""
        books = {
            "run_id": self.run_id,
            "base_fingerprint": self._base_fingerprint,
            "last_version": self._last_version,
        }
        temporary = self.path / f"{_BOOKS}.new"
        with temporary.open("w") as file:
            json.dump(books, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path / _BOOKS)
        directory = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


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
