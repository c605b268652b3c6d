"""Adapters as PEFT directories: what PEFT and vLLM load, and what a checkpoint holds.

The data section of a safetensors file has no gaps, and neither has a flat buffer; so an update is
received straight into the file that the engine will load, behind a header made from the manifest.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import shutil
from pathlib import Path
from typing import IO, Any

from common.adapter import ExpertLayout, LoraConfig, Manifest
from common.errors import StagingFailed, StagingFull
from common.peft_checks import BASE_CHANGING_INITS
from common.peft_names import EXPERT_PARAMETERS, EXPERTS
from common.peft_reader import (
    CONFIG_FILE,
    EXPERT_LAYOUT,
    HEADER_LENGTH_BYTES,
    MODEL_FILE,
    WEIGHTS_FILE,
    PeftAdapter,
    read_peft_dir,
)

__all__ = [
    "BASE_CHANGING_INITS",
    "CONFIG_FILE",
    "MODEL_FILE",
    "WEIGHTS_FILE",
    "PeftAdapter",
    "PeftWriter",
    "peft_config",
    "read_peft_dir",
    "write_peft_dir",
]


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


class PeftWriter:
    """A PEFT directory that is being written; of whole weights, one with `MODEL_FILE` alone.

        writer = PeftWriter(path, manifest)
        writer.write(0, flat_bytes)
        writer.finish()

    What was written can be read from `buffer`, as long as somebody has it, even when the files are
    gone.

    Raises:
        StagingFull: the file system has no room for it; nothing is left behind.
        StagingFailed: another error of the file system; from every method but `discard`.
    """

    def __init__(self, path: Path, manifest: Manifest, *, base_model: str = "") -> None:
        self.path = path
        self._aliases = [spec for spec in manifest.tensors if spec.alias_of]
        header = _header(manifest)
        self._data_bytes = len(header)
        size = len(header) + sum(spec.size_bytes for spec in manifest.tensors)
        config = json.dumps(peft_config(manifest.lora, base_model)) if manifest.lora else None
        self._file, mapped = _create(path, config=config, weights_bytes=size)
        self._write(0, header)
        self.buffer = memoryview(mapped)[len(header) : len(header) + manifest.total_bytes]
        """The flat buffer, read-only: `manifest.total_bytes` long."""

    def write(self, begin: int, data: bytes | memoryview) -> None:
        """Put bytes of the flat buffer where they belong."""
        self._write(self._data_bytes + begin, data)

    def finish(self) -> Path:
        """Write the aliased tensors out behind the flat buffer; without effect a second time."""
        if self._file.closed:
            return self.path
        end = self._data_bytes + len(self.buffer)
        for spec in self._aliases:
            self._write(end, self.buffer[spec.offset_bytes : spec.end_bytes])
            end += spec.size_bytes
        self._file.close()
        return self.path

    def discard(self) -> None:
        """Remove all that was written, or what a sweeper of temporary files has left of it."""
        self._file.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def _write(self, position: int, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        try:
            while rest:
                written = os.pwrite(self._file.fileno(), rest, position)
                rest, position = rest[written:], position + written
        except OSError as error:
            raise _failure(self.path, error) from error


def _create(path: Path, *, config: str | None, weights_bytes: int) -> tuple[IO[bytes], mmap.mmap]:
    """The files, the larger one open and mapped; on an error neither, nor their directory."""
    try:
        path.mkdir(parents=True)
        try:
            if config is None:
                return _allocate(path / MODEL_FILE, weights_bytes)
            (path / CONFIG_FILE).write_text(config)
            return _allocate(path / WEIGHTS_FILE, weights_bytes)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise _failure(path, error) from error
        raise StagingFull(
            f"staging directory {path.parent}: {error.strerror}; an update needs {weights_bytes} "
            f"bytes, {_free_bytes(path)} are free; enlarge the file system or keep fewer versions"
        ) from error


def _failure(path: Path, error: OSError) -> StagingFailed:
    return StagingFailed(f"staging directory {path.parent}: {error.strerror}; see to it and retry")


def _free_bytes(path: Path) -> int:
    """Of its file system; `path` itself need not exist."""
    return shutil.disk_usage(next(above for above in path.parents if above.exists())).free


def _allocate(path: Path, size_bytes: int) -> tuple[IO[bytes], mmap.mmap]:
    """The blocks are reserved now: where later ones are missing, the mapping is a SIGBUS."""
    with contextlib.ExitStack() as on_error:
        file = on_error.enter_context(path.open("w+b", buffering=0))
        os.posix_fallocate(file.fileno(), 0, size_bytes)
        mapped = mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ)
        on_error.pop_all()
        return file, mapped


def _header(manifest: Manifest) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"} | _expert_layout(manifest)}
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


def _expert_layout(manifest: Manifest) -> dict[str, str]:
    """The tag of a file whose tensors each hold the factors of several experts."""
    layouts = {spec.layout for spec in manifest.tensors}
    for experts in (ExpertLayout.PACKED, ExpertLayout.FLAT, ExpertLayout.SWAPPED):
        if layouts & set(experts.factors):
            return {EXPERT_LAYOUT: experts.value}
    return {}


def peft_config(lora: LoraConfig, base_model: str) -> dict[str, Any]:
    """The content of adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [name for name in lora.target_modules if name != EXPERTS],
        "target_parameters": list(EXPERT_PARAMETERS) if EXPERTS in lora.target_modules else None,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
        "rank_pattern": dict(lora.rank_pattern),
        "alpha_pattern": dict(lora.alpha_pattern),
    }


def write_peft_dir(
    path: Path, manifest: Manifest, buffer: memoryview, *, base_model: str = ""
) -> Path:
    """Write one finished adapter, which appears under `path` whole; `buffer` is its flat buffer."""
    partial = path.with_name(f".{path.name}.partial")
    writer = PeftWriter(partial, manifest, base_model=base_model)
    writer.write(0, buffer)
    writer.finish()
    return partial.rename(path)
