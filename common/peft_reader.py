"""A PEFT directory, read without trust: whatever is wrong with it is one `ConfigError`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.adapter import Dtype, Layout, LoraConfig, Manifest, TensorEntry, TensorSpec, plan, seal
from common.errors import ConfigError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
HEADER_LENGTH_BYTES = 8

BASE_CHANGING_INITS = ("pissa", "olora", "loftq", "corda")
"""Initialisations that change the base weights; their factors are relative to the changed ones."""


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """A PEFT directory's content: `manifest` describes the flat `buffer`."""

    manifest: Manifest
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor as the file's header has it; `module` is its name without the factor's suffix."""

    name: str
    module: str
    layout: Layout
    dtype: Dtype
    shape: tuple[int, int]
    start: int
    end: int


def read_peft_dir(path: Path, *, base_fingerprint: str) -> PeftAdapter:
    """Read an adapter in the order of its file, tensors with equal bytes as aliases.

    Raises:
        ConfigError: a file is missing or malformed, or the adapter is of a kind that vLLM's LoRA
            slots cannot serve.
    """
    lora = _read_config(path / CONFIG_FILE)
    weights = path / WEIGHTS_FILE
    header, data = _read_safetensors(weights)
    stored = [_stored(weights, name, item, rank=lora.rank) for name, item in header.items()]
    _check_cover(weights, stored, len(data))
    _check_pairs(weights, stored)
    sources = {tensor.name: data[tensor.start : tensor.end] for tensor in stored}
    return _pack(base_fingerprint, lora, plan(_entries(stored, sources)), sources)


def _entries(stored: Iterable[_Stored], sources: dict[str, memoryview]) -> list[TensorEntry]:
    first_with: dict[tuple[Dtype, tuple[int, int], bytes], str] = {}
    entries: list[TensorEntry] = []
    for tensor in stored:
        key = (tensor.dtype, tensor.shape, sources[tensor.name].tobytes())
        first = first_with.setdefault(key, tensor.name)
        alias_of = "" if first == tensor.name else first
        entries.append(
            TensorEntry(tensor.name, tensor.dtype, tensor.shape, tensor.layout, alias_of)
        )
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


def _read_config(path: Path) -> LoraConfig:
    config = _json_object(path, _read(path), what="JSON")
    _check_kind(path, config)
    rank, alpha, targets = (config.get(key) for key in ("r", "lora_alpha", "target_modules"))
    if type(rank) is not int or rank < 1:
        raise ConfigError(f"{path}: r = {rank!r}; a LoRA rank is a whole number of at least 1")
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if alpha is None or not is_number or not 0 < alpha <= sys.float_info.max:
        raise ConfigError(f"{path}: lora_alpha = {alpha!r}; it must be above 0, and finite")
    if not isinstance(targets, list) or not targets or not all(type(t) is str for t in targets):
        raise ConfigError(f"{path}: target_modules = {targets!r}; give the list of projections")
    return LoraConfig(rank, alpha, tuple(sorted(targets)), bool(config.get("use_rslora", False)))


def _check_kind(path: Path, config: dict[str, Any]) -> None:
    """Refuse what is more than two factors a module on top of the unchanged base."""
    for key in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save"):
        if config.get(key):
            raise ConfigError(f"{path}: {key} = {config[key]!r} cannot be served; remove it")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"{path}: bias = {config['bias']!r} cannot be served; use 'none'")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(BASE_CHANGING_INITS):
        raise ConfigError(
            f"{path}: init_lora_weights = {init!r} changes the base weights, which replicas never "
            "receive; convert the adapter to plain LoRA as PEFT documents it"
        )


def _read_safetensors(path: Path) -> tuple[dict[str, Any], memoryview]:
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
    header.pop("__metadata__", None)
    if not header:
        raise ConfigError(f"{path}: holds no tensor; save the adapter's weights in it")
    return header, content[data_start:]


def _stored(path: Path, name: str, item: Any, *, rank: int) -> _Stored:
    layout = next((part for part in Layout if name.endswith(f".{part.value}.weight")), None)
    if layout is None:
        raise ConfigError(
            f"{path}: tensor {name!r} is no LoRA factor; "
            "only names that end in .lora_A.weight or .lora_B.weight can be served"
        )
    missing = {"dtype", "shape", "data_offsets"} - set(item if isinstance(item, dict) else ())
    if missing:
        raise ConfigError(
            f"{path}: tensor {name!r} lacks {', '.join(sorted(missing))}; write the file again"
        )
    dtype = _dtype(path, name, item["dtype"])
    shape = _shape(path, name, item["shape"], rank=rank, layout=layout)
    start, end = _offsets(path, name, item["data_offsets"], math.prod(shape) * dtype.itemsize)
    module = name.removesuffix(f".{layout.value}.weight")
    return _Stored(name, module, layout, dtype, shape, start, end)


def _dtype(path: Path, name: str, found: Any) -> Dtype:
    try:
        return Dtype(found)
    except ValueError as error:
        known = ", ".join(part.value for part in Dtype)
        raise ConfigError(f"{path}: tensor {name!r} has dtype {found!r}; use {known}") from error


def _shape(path: Path, name: str, found: Any, *, rank: int, layout: Layout) -> tuple[int, int]:
    sizes = _naturals(found)
    if len(sizes) != 2 or 0 in sizes:
        raise ConfigError(
            f"{path}: tensor {name!r} has shape {found!r}; a LoRA factor has two sizes above 0"
        )
    own = sizes[0] if layout is Layout.LORA_A else sizes[1]
    if own != rank:
        raise ConfigError(
            f"{path}: tensor {name!r} has shape {found!r}, of rank {own}, but r = {rank} in "
            f"{CONFIG_FILE}; make them agree"
        )
    return sizes[0], sizes[1]


def _offsets(path: Path, name: str, found: Any, size_bytes: int) -> tuple[int, int]:
    offsets = _naturals(found)
    if len(offsets) != 2 or offsets[1] - offsets[0] != size_bytes:
        raise ConfigError(
            f"{path}: tensor {name!r} has data_offsets {found!r}, but shape and dtype need "
            f"{size_bytes} bytes; write the file again"
        )
    return offsets[0], offsets[1]


def _naturals(found: Any) -> tuple[int, ...]:
    """A list of whole numbers from 0 up; what is none is empty."""
    fits = isinstance(found, list) and all(type(n) is int and n >= 0 for n in found)
    return tuple(found) if fits else ()


def _check_cover(path: Path, stored: Iterable[_Stored], data_bytes: int) -> None:
    """The tensors must lie back to back, from the first byte of the data to its last."""
    end = 0
    for tensor in sorted(stored, key=lambda t: t.start):
        if tensor.start != end:
            raise ConfigError(
                f"{path}: tensor {tensor.name!r} starts at byte {tensor.start} of the data, the "
                f"one before it ends at {end}; write the file again without gap or overlap"
            )
        end = tensor.end
    if end != data_bytes:
        raise ConfigError(
            f"{path}: {data_bytes} bytes of data, its header says {end}; write the file again"
        )


def _check_pairs(path: Path, stored: Iterable[_Stored]) -> None:
    layouts: dict[str, list[Layout]] = {}
    for tensor in stored:
        layouts.setdefault(tensor.module, []).append(tensor.layout)
    for module, found in layouts.items():
        if len(found) == 1:
            raise ConfigError(
                f"{path}: {module!r} has only {found[0].value}; save both lora_A and lora_B of it"
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
