"""Model directories that exist only when they are complete."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import ConfigError

MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")


def is_model(path: Path) -> bool:
    """Whether `path` holds a whole model with its tokenizer."""
    return all((path / name).is_file() for name in MODEL_FILES)


@contextmanager
def filling(out: Path) -> Iterator[Path]:
    """Give an empty directory beside `out` and rename it to `out` when the block succeeds.

    A process that dies or a block that raises leaves no `out`. Two processes may fill the same
    `out`; the second one's work is dropped.

    Raises:
        ConfigError: `out` exists and is something other than an empty directory or a model.
    """
    _check_usable(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield work
        _make_readable(work)
        try:
            os.rename(work, out)
        except OSError:
            _check_usable(out)
            if not is_model(out):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_usable(out: Path) -> None:
    if out.is_dir() and (is_model(out) or not any(out.iterdir())):
        return
    if out.exists() or out.is_symlink():
        raise ConfigError(
            f"model directory: {out} exists and is no complete model; remove it or name another"
        )


def _make_readable(directory: Path) -> None:
    """Let other users read it, a container's for one: mkdtemp and safetensors shut them out."""
    directory.chmod(0o755)
    for file in directory.iterdir():
        file.chmod(0o644)
