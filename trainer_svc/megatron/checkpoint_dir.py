"""A checkpoint's directory, which is there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import CheckpointFailed


class CheckpointDir:
    """A directory that is being written; used by one process.

        directory = CheckpointDir(path)
        directory.begin()
        ...                     # files under directory.partial
        directory.publish()     # or discard()

    Raises:
        CheckpointFailed: the file system refuses; what lay under `path` still does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = path.with_name(f".{path.name}.partial")
        self._old = path.with_name(f".{path.name}.old")

    def begin(self) -> None:
        """Make an empty `partial`."""
        self.recover()
        with writing(self.path):
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)

    def publish(self) -> None:
        """Rename into place, on disk first; an older checkpoint of that name makes way."""
        with writing(self.path):
            for below in (*self.partial.rglob("*"), self.partial):
                _sync(below)
            if self.path.exists():
                shutil.rmtree(self._old, ignore_errors=True)
                self.path.rename(self._old)
            self.partial.rename(self.path)
            _sync(self.path.parent)
            _sync(self.path.parent.parent)
            shutil.rmtree(self._old, ignore_errors=True)

    def discard(self) -> None:
        """Remove what was written, and free its room."""
        shutil.rmtree(self.partial, ignore_errors=True)
        self.recover()

    def recover(self) -> None:
        """Undo half of a `publish`: a checkpoint made way for one that never came."""
        if self._old.exists() and not self.path.exists():
            with writing(self.path):
                self._old.rename(self.path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors of the file system in a `with` block become those of the checkpoint `path`."""
    try:
        yield
    except OSError as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        raise CheckpointFailed(
            f"checkpoint: {path} could not be written ({cause.strerror or cause}); the one before "
            "is kept; make room, or see to its file system"
        ) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
