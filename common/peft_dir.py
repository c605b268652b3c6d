"""Adapters as PEFT directories: what PEFT and vLLM load, and what a checkpoint holds.

The data section of a safetensors file has no gaps, and neither has a flat buffer; so an update is
received straight into the file that the engine will load, behind a header made from the manifest.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.adapter import Dtype, Layout, LoraConfig, Manifest, TensorEntry, TensorSpec, plan, seal
from common.errors import ConfigError, StagingFull

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_HEADER_LENGTH_BYTES = 8


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
    return len(text).to_bytes(_HEADER_LENGTH_BYTES, "little") + text


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
    """Write one finished adapter; `buffer` is its flat buffer."""
    writer = PeftWriter(path, manifest, base_model=base_model)
    writer.buffer[:] = buffer
    return writer.finish()


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """A PEFT directory's content: `manifest` describes the flat `buffer`."""

    manifest: Manifest
    buffer: memoryview


def read_peft_dir(path: Path, *, base_fingerprint: str) -> PeftAdapter:
    """Read an adapter in the order of its file, tensors with equal bytes as aliases.

    Raises:
        ConfigError: a file is missing or malformed, or the adapter is of a kind that vLLM's LoRA
            slots cannot serve.
    """
    lora = _read_config(path / CONFIG_FILE)
    header, data = _read_safetensors(path / WEIGHTS_FILE)
    first_with: dict[tuple[str, tuple[int, ...], bytes], str] = {}
    sources: dict[str, memoryview] = {}
    entries: list[TensorEntry] = []
    for name, item in header.items():
        start, end = item["data_offsets"]
        sources[name] = data[start:end]
        key = (item["dtype"], tuple(item["shape"]), sources[name].tobytes())
        alias_of = first_with.setdefault(key, name)
        entries.append(_entry(path, name, item, "" if alias_of == name else alias_of))
    specs = plan(entries)
    return _pack(base_fingerprint, lora, specs, sources)


def _pack(
    base_fingerprint: str,
    lora: LoraConfig,
    specs: tuple[TensorSpec, ...],
    sources: dict[str, memoryview],
) -> PeftAdapter:
    buffer = memoryview(bytearray(Manifest(base_fingerprint, lora, specs).total_bytes))
    for spec in specs:
        if not spec.alias_of:
            buffer[spec.offset_bytes : spec.end_bytes] = sources[spec.name]
    return PeftAdapter(Manifest(base_fingerprint, lora, seal(specs, buffer)), buffer.toreadonly())


def _entry(path: Path, name: str, item: dict[str, Any], alias_of: str) -> TensorEntry:
    layout = next((part for part in Layout if f".{part.value}." in name), None)
    if layout is None or len(item["shape"]) != 2:
        raise ConfigError(
            f"{path / WEIGHTS_FILE}: tensor {name!r} {item['shape']} is no LoRA factor; "
            "only two-dimensional lora_A and lora_B can be served"
        )
    try:
        dtype = Dtype(item["dtype"])
    except ValueError as error:
        known = ", ".join(part.value for part in Dtype)
        raise ConfigError(
            f"{path / WEIGHTS_FILE}: tensor {name!r} has dtype {item['dtype']}; use {known}"
        ) from error
    return TensorEntry(name, dtype, tuple(item["shape"]), layout, alias_of)


def _read_config(path: Path) -> LoraConfig:
    config = json.loads(_read(path))
    for key in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save"):
        if config.get(key):
            raise ConfigError(f"{path}: {key} = {config[key]!r} cannot be served; remove it")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"{path}: bias = {config['bias']!r} cannot be served; use 'none'")
    rank, alpha, targets = (config.get(key) for key in ("r", "lora_alpha", "target_modules"))
    if not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"{path}: r = {rank!r}; a LoRA rank is a whole number of at least 1")
    if not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise ConfigError(f"{path}: lora_alpha = {alpha!r}; it must be above 0")
    if not isinstance(targets, list) or not targets:
        raise ConfigError(f"{path}: target_modules = {targets!r}; give the list of projections")
    return LoraConfig(rank, alpha, tuple(sorted(targets)), bool(config.get("use_rslora", False)))


def _read_safetensors(path: Path) -> tuple[dict[str, Any], memoryview]:
    content = memoryview(_read(path))
    header_bytes = int.from_bytes(content[:_HEADER_LENGTH_BYTES], "little")
    data_start = _HEADER_LENGTH_BYTES + header_bytes
    try:
        header = json.loads(bytes(content[_HEADER_LENGTH_BYTES:data_start]))
    except ValueError as error:
        raise ConfigError(f"{path}: not a safetensors file, or cut short") from error
    header.pop("__metadata__", None)
    data = content[data_start:]
    if max((item["data_offsets"][1] for item in header.values()), default=-1) != len(data):
        raise ConfigError(f"{path}: {len(data)} bytes of data are not what its header says")
    return header, data


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; give a PEFT adapter directory") from error
