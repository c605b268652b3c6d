"""The base model's own weights as an update, for replicas that started without them."""

from __future__ import annotations

import asyncio
import mmap
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.adapter import (
    BASE_NAME,
    AdapterRef,
    Dtype,
    Kind,
    Layout,
    Manifest,
    TensorEntry,
    plan,
    seal,
)
from common.errors import ConfigError
from common.model_dir import read_header
from common.peft_dir import PeftAdapter
from common.stream.content import Content


class BaseWeights:
    """Read from the model's directory when a replica asks; gone when the last one has them.

    content = await BaseWeights(path, base_fingerprint=fingerprint).content(run_id)
    """

    def __init__(self, path: Path, *, base_fingerprint: str) -> None:
        self.ref: AdapterRef | None = None
        """What was sent, once something was; the base never changes, and so neither does this."""

        self._path, self._fingerprint = path, base_fingerprint
        self._kept: weakref.ref[Content] | None = None
        self._reading = asyncio.Lock()

    async def content(self, run_id: str) -> Content:
        """The whole model in memory, for as long as the caller holds it.

        Raises:
            ConfigError: the directory is damaged, or a tensor of a type that does not travel.
        """
        async with self._reading:
            content = self._kept() if self._kept else None
            if content is None:
                read = await asyncio.to_thread(
                    read_base, self._path, base_fingerprint=self._fingerprint
                )
                self.ref = AdapterRef(run_id, BASE_NAME, 1, read.manifest.digest())
                content = Content.whole(self.ref, read.manifest, read.buffer)
                self._kept = weakref.ref(content)
            return content


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor, and where its bytes lie."""

    entry: TensorEntry
    path: Path
    start: int


def read_base(model_dir: Path, *, base_fingerprint: str) -> PeftAdapter:
    """Every tensor of a Hugging Face directory, bit for bit, under its name there.

    Raises:
        ConfigError: a tensor has a type that does not travel, or a file is cut short.
    """
    stored: dict[str, _Stored] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        for tensor in _tensors(path):
            stored.setdefault(tensor.entry.name, tensor)
    specs = plan(tensor.entry for tensor in stored.values())
    manifest = Manifest(base_fingerprint, None, specs, Kind.BASE)
    buffer = memoryview(mmap.mmap(-1, manifest.total_bytes))
    for spec in specs:
        _read_into(buffer[spec.offset_bytes : spec.end_bytes], stored[spec.name])
    sealed = Manifest(base_fingerprint, None, seal(specs, buffer), Kind.BASE)
    return PeftAdapter(sealed, buffer.toreadonly())


def _tensors(path: Path) -> Iterator[_Stored]:
    with path.open("rb") as file:
        header, data_start = read_header(file)
    for name, item in header.items():
        entry = TensorEntry(name, _dtype(path, name, item), tuple(item["shape"]), Layout.WEIGHT)
        yield _Stored(entry, path, data_start + item["data_offsets"][0])


def _dtype(path: Path, name: str, item: dict[str, Any]) -> Dtype:
    try:
        return Dtype(item["dtype"])
    except ValueError as error:
        known = ", ".join(part.value for part in Dtype)
        raise ConfigError(
            f"{path}: tensor {name!r} has dtype {item['dtype']}; replicas without weights can be "
            f"sent {known} only, start them with the model's files"
        ) from error


def _read_into(target: memoryview, tensor: _Stored) -> None:
    with tensor.path.open("rb") as file:
        file.seek(tensor.start)
        if file.readinto(target) != len(target):
            raise ConfigError(f"{tensor.path}: cut short; download the model again")
