"""Adapters as PEFT directories: what PEFT and vLLM load, and what a checkpoint holds.

The data section of a safetensors file has no gaps, and neither has a flat buffer; so an update is
received straight into the file that the engine will load, behind a header made from the manifest.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
from pathlib import Path
from typing import Any

from common.adapter import LoraConfig, Manifest
from common.errors import StagingFull
from common.peft_reader import (
    BASE_CHANGING_INITS,
    CONFIG_FILE,
    HEADER_LENGTH_BYTES,
    WEIGHTS_FILE,
    PeftAdapter,
    read_peft_dir,
)

__all__ = [
    "BASE_CHANGING_INITS",
    "CONFIG_FILE",
    "WEIGHTS_FILE",
    "PeftAdapter",
    "PeftWriter",
    "peft_config",
    "read_peft_dir",
    "write_peft_dir",
]


class PeftWriter:
    """A PEFT directory that is being written.

        writer = PeftWriter(path, manifest)
        writer.buffer[:] = flat_bytes
        writer.finish()

    Raises:
        StagingFull: the file system has no room for it; nothing is left behind.
    """

    def __init__(self, path: Path, manifest: Manifest, *, base_model: str = "") -> None:
        self.path = path
        self._aliases = [spec for spec in manifest.tensors if spec.alias_of]
        header = _header(manifest)
        self._data_bytes = len(header)
        size = len(header) + sum(spec.size_bytes for spec in manifest.tensors)
        path.mkdir(parents=True)
        try:
            (path / CONFIG_FILE).write_text(json.dumps(peft_config(manifest.lora, base_model)))
            self._file = _allocate(path / WEIGHTS_FILE, size)
        except OSError:
            shutil.rmtree(path)
            raise
        self._file[: len(header)] = header
        self._all = memoryview(self._file)
        self.buffer = self._all[len(header) : len(header) + manifest.total_bytes]
        """The flat buffer, writable: `manifest.total_bytes` long."""

    def finish(self) -> Path:
        """Write the aliased tensors out behind the flat buffer and close the file."""
        end = self._data_bytes + len(self.buffer)
        for spec in self._aliases:
            self._all[end : end + spec.size_bytes] = self.buffer[spec.offset_bytes : spec.end_bytes]
            end += spec.size_bytes
        self._close()
        return self.path

    def discard(self) -> None:
        """Remove all that was written."""
        self._close()
        shutil.rmtree(self.path)

    def _close(self) -> None:
        self.buffer.release()
        self._all.release()
        self._file.close()


def _allocate(path: Path, size_bytes: int) -> mmap.mmap:
    """Reserve the blocks now: on a full tmpfs a later write to the mapping would be a SIGBUS."""
    with path.open("w+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            free_bytes = shutil.disk_usage(path.parent).free
            raise StagingFull(
                f"staging directory {path.parent}: an update needs {size_bytes} bytes, "
                f"{free_bytes} are free; enlarge the file system or keep fewer versions"
            ) from error
        return mmap.mmap(file.fileno(), size_bytes)


def _header(manifest: Manifest) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end_bytes = manifest.total_bytes
    for spec in manifest.tensors:
        start = end_bytes if spec.alias_of else spec.offset_bytes
        end_bytes += spec.size_bytes if spec.alias_of else 0
        entries[spec.name] = {
            "dtype": spec.dtype.value,
            "shape": spec.shape,
            "data_offsets": [start, start + spec.size_bytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(HEADER_LENGTH_BYTES, "little") + text


def peft_config(lora: LoraConfig, base_model: str) -> dict[str, Any]:
    """The content of adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.target_modules),
        "use_rslora": lora.use_rslora,
        "use_dora": False,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def write_peft_dir(
    path: Path, manifest: Manifest, buffer: memoryview, *, base_model: str = ""
) -> Path:
    """Write one finished adapter, which appears under `path` whole; `buffer` is its flat buffer."""
    partial = path.with_name(f".{path.name}.partial")
    writer = PeftWriter(partial, manifest, base_model=base_model)
    writer.buffer[:] = buffer
    writer.finish()
    return partial.rename(path)
