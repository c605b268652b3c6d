"""The base model's directory and the fingerprint by which both sides know it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from refit.v1 import version_pb2

from common.errors import ConfigError

_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class BaseModel:
    """Frozen weights: their directory's name, a SHA-256 in hex, and where they lie here."""

    name: str
    fingerprint: str
    path: Path | None = field(default=None, compare=False)

    def to_proto(self) -> version_pb2.BaseModel:
        return version_pb2.BaseModel(name=self.name, fingerprint=self.fingerprint)


def base_model(path: Path) -> BaseModel:
    """Fingerprint a Hugging Face directory.

    Hashes every tensor's name, dtype, shape, first and last 4 KiB, in order of name: what a
    fine-tune or another model changes is seen, how the files are sharded is not, and a large model
    takes milliseconds.

    Raises:
        ConfigError: the directory, its config.json or its weights are missing.
    """
    if not path.is_dir():
        raise ConfigError(f"model: {path} is no directory; give a Hugging Face model directory")
    if not (path / "config.json").is_file():
        raise ConfigError(f"model: {path} has no config.json; give a Hugging Face model directory")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model: {path} has no *.safetensors; save the weights as safetensors")
    parts = sorted(part for file in files for part in _tensor_digests(file))
    total = hashlib.sha256()
    for name, digest in parts:
        total.update(name.encode() + b"\0" + digest)
    return BaseModel(path.resolve().name, total.hexdigest(), path)


def read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The tensors of a safetensors file by name, and the byte that their offsets count from."""
    header_bytes = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    return header, 8 + header_bytes


def _tensor_digests(path: Path) -> list[tuple[str, bytes]]:
    with path.open("rb") as file:
        header, data_start = read_header(file)
        return [(name, _tensor_digest(file, data_start, item)) for name, item in header.items()]


def _tensor_digest(file: BinaryIO, data_start: int, item: dict[str, list[int]]) -> bytes:
    start, end = (data_start + offset for offset in item["data_offsets"])
    digest = hashlib.sha256(f"{item['dtype']} {item['shape']}".encode())
    for offset in (start, max(start, end - _SAMPLE_BYTES)):
        file.seek(offset)
        digest.update(file.read(min(_SAMPLE_BYTES, end - offset)))
    return digest.digest()
