"""A PEFT directory, read without trust: whatever is wrong with it is one `ConfigError`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.adapter import (
    Dtype,
    ExpertLayout,
    Layout,
    LoraConfig,
    Manifest,
    TensorEntry,
    TensorSpec,
    plan,
    seal,
)
from common.errors import ConfigError
from common.peft_checks import lora_config
from common.peft_tensors import check_pairs, expert_layout, lora_factor, naturals

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MODEL_FILE = "model.safetensors"
HEADER_LENGTH_BYTES = 8
EXPERT_LAYOUT = "expert_layout"
"""Key in the metadata of a safetensors file; the value is that of an `ExpertLayout`."""


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """A PEFT directory's content: `manifest` describes the flat `buffer`."""

    manifest: Manifest
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor as the file's header has it, and where its bytes lie in the data."""

    entry: TensorEntry
    start: int
    end: int


def read_peft_dir(path: Path, *, base_fingerprint: str) -> PeftAdapter:
    """Read an adapter in the order of its file, tensors with equal bytes as aliases.

    Raises:
        ConfigError: a file is missing or malformed, or the adapter is of a kind that this system
            does not know.
    """
    config = path / CONFIG_FILE
    lora = lora_config(config, _json_object(config, _read(config), what="JSON"))
    weights = path / WEIGHTS_FILE
    header, metadata, data = _read_safetensors(weights)
    experts = expert_layout(weights, header, tag=metadata.get(EXPERT_LAYOUT))
    stored = [_stored(weights, name, item, lora, experts) for name, item in header.items()]
    _check_cover(weights, stored, len(data))
    check_pairs(weights, (tensor.entry for tensor in stored), use_dora=lora.use_dora)
    sources = {tensor.entry.name: data[tensor.start : tensor.end] for tensor in stored}
    return _pack(base_fingerprint, lora, plan(_entries(stored, sources)), sources)


def _entries(stored: Iterable[_Stored], sources: dict[str, memoryview]) -> list[TensorEntry]:
    first_with: dict[tuple[Dtype, Layout, tuple[int, ...], bytes], str] = {}
    entries: list[TensorEntry] = []
    for entry in (tensor.entry for tensor in stored):
        key = (entry.dtype, entry.layout, entry.shape, sources[entry.name].tobytes())
        first = first_with.setdefault(key, entry.name)
        entries.append(replace(entry, alias_of="" if first == entry.name else first))
    return entries


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


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, Any], memoryview]:
    """The tensors' entries in its header, its metadata, and its data."""
    content = memoryview(_read(path))
    header_bytes = int.from_bytes(content[:HEADER_LENGTH_BYTES], "little")
    data_start = HEADER_LENGTH_BYTES + header_bytes
    if data_start > len(content):
        raise ConfigError(
            f"{path}: {len(content)} bytes, its header alone should end at {data_start}; "
            "not a safetensors file, or cut short, so write it again"
        )
    text = bytes(content[HEADER_LENGTH_BYTES:data_start])
    header = _json_object(path, text, what="a safetensors header")
    metadata = header.pop("__metadata__", None)
    if not header:
        raise ConfigError(f"{path}: holds no tensor; save the adapter's weights in it")
    return header, metadata if isinstance(metadata, dict) else {}, content[data_start:]


def _stored(path: Path, name: str, item: Any, lora: LoraConfig, experts: ExpertLayout) -> _Stored:
    missing = {"dtype", "shape", "data_offsets"} - set(item if isinstance(item, dict) else ())
    if missing:
        raise ConfigError(
            f"{path}: tensor {name!r} lacks {', '.join(sorted(missing))}; write the file again"
        )
    entry = lora_factor(
        path, name, dtype=item["dtype"], shape=item["shape"], lora=lora, experts=experts
    )
    size_bytes = math.prod(entry.shape) * entry.dtype.itemsize
    return _Stored(entry, *_offsets(path, name, item["data_offsets"], size_bytes))


def _offsets(path: Path, name: str, found: Any, size_bytes: int) -> tuple[int, int]:
    offsets = naturals(found)
    if len(offsets) != 2 or offsets[1] - offsets[0] != size_bytes:
        raise ConfigError(
            f"{path}: tensor {name!r} has data_offsets {found!r}, but shape and dtype need "
            f"{size_bytes} bytes; write the file again"
        )
    return offsets[0], offsets[1]


def _check_cover(path: Path, stored: Iterable[_Stored], data_bytes: int) -> None:
    """The tensors must lie back to back, from the first byte of the data to its last."""
    end = 0
    for tensor in sorted(stored, key=lambda t: t.start):
        if tensor.start != end:
            raise ConfigError(
                f"{path}: tensor {tensor.entry.name!r} starts at byte {tensor.start} of the data, "
                f"the one before it ends at {end}; write the file again without gap or overlap"
            )
        end = tensor.end
    if end != data_bytes:
        raise ConfigError(
            f"{path}: {data_bytes} bytes of data, its header says {end}; write the file again"
        )


def _json_object(path: Path, text: bytes, *, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not {what}, or cut short: {error}; write the file again"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path}: not {what}: found a {type(found).__name__} instead of an object; "
            "write the file again"
        )
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{path}: no such file; give a PEFT adapter directory") from error
