"""A replica's own folder on the staging file system, and the removal of dead replicas' folders."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

from common.errors import ConfigError

_LOCK_SUFFIX = ".lock"


@contextlib.contextmanager
def staging_folder(parent: Path, name: str) -> Iterator[Path]:
    """`parent/name` for as long as the block runs.

    A lock that goes with the process tells the living from the dead: what a killed replica left
    in memory is freed by the next one that starts.

    Raises:
        ConfigError: `parent` cannot be made or written to.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for lock_path in parent.glob(f"*{_LOCK_SUFFIX}"):
            _remove_if_dead(lock_path)
        lock = (parent / f"{name}{_LOCK_SUFFIX}").open("w")
    except OSError as error:
        raise ConfigError(
            f"staging_dir: {parent}: {error.strerror}; give a directory this user can write to"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = parent / name
        folder.mkdir()
        try:
            yield folder
        finally:
            _remove(Path(lock.name))


def _remove_if_dead(lock_path: Path) -> None:
    with contextlib.suppress(FileNotFoundError, BlockingIOError), lock_path.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(lock_path)


def _remove(lock_path: Path) -> None:
    shutil.rmtree(lock_path.with_suffix(""), ignore_errors=True)
    lock_path.unlink(missing_ok=True)
