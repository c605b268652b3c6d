"""Where the base model's own weights are read from when an adapter is summed into them."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import Incompatible, StagingFailed, StagingFull
from common.tasks import see_through

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


@dataclass(slots=True)
class PristineBase:
    """A directory of safetensors that nothing writes to.

    Args:
        model: the model's directory; None where the engine started without the base's weights.
        copy_to: where a copy in memory is made, before the first use; None reads `model` each time.
    """

    model: Path | None
    copy_to: Path | None = None
    _directory: Path | None = None
    _making: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def missing(self) -> bool:
        """Nobody has sent the base's weights yet."""
        return self.model is None and self._directory is None

    async def directory(self) -> Path:
        """The weights' directory.

        Raises:
            Incompatible: they are not here.
            StagingFull: there is no room for the copy; StagingFailed: another error of the disk.
        """
        async with self._making:
            if self._directory is None:
                self._directory = await self._made()
        return self._directory

    async def _made(self) -> Path:
        if self.model is None:
            raise Incompatible(
                "manifest.merge: the base's weights are not here; send ADAPTER_KIND_BASE first"
            )
        if self.copy_to is None:
            return self.model
        await see_through(asyncio.to_thread(_copy, self.model, self.copy_to))
        return self.copy_to

    def is_at(self, directory: Path) -> bool:
        return directory == self._directory

    def take(self, directory: Path) -> None:
        """The base was sent: its staged directory stays."""
        self._directory = directory


def _copy(model: Path, target: Path) -> None:
    files = [file for pattern in _WEIGHTS for file in model.glob(pattern)]
    needed = sum(file.stat().st_size for file in files)
    try:
        target.mkdir(parents=True)
        free = shutil.disk_usage(target).free
        if needed > free:
            raise StagingFull(
                f"base_copy: the base's weights take {needed} bytes, {target.parent} has {free} "
                'left; make it larger, or set base_copy = "checkpoint"'
            )
        for file in files:
            shutil.copy(file, target)
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, StagingFailed):
            raise
        raise StagingFailed(f"base_copy: {target}: {error.strerror}") from error
