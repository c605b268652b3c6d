"""A flat buffer's tensors for torch, and the file that such a buffer is exported to."""

from __future__ import annotations

import errno
import math
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from common.adapter import Dtype, TensorSpec
from common.errors import StagingFull

TORCH_DTYPES = {
    Dtype.FLOAT32: torch.float32,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT16: torch.float16,
}
WIRE_DTYPES = {value: key for key, value in TORCH_DTYPES.items()}


def tensors_of(specs: Iterable[TensorSpec], buffer: memoryview) -> dict[str, Tensor]:
    """Every tensor of a writable flat buffer, by name, in the buffer's own memory."""
    whole: dict[Dtype, Tensor] = {}
    found = {}
    for spec in specs:
        itemsize = spec.dtype.itemsize
        if spec.dtype not in whole:
            count = len(buffer) // itemsize
            whole[spec.dtype] = torch.frombuffer(
                buffer, dtype=TORCH_DTYPES[spec.dtype], count=count
            )
        begin = spec.offset_bytes // itemsize
        flat = whole[spec.dtype][begin : begin + math.prod(spec.shape)]
        found[spec.name] = flat.view(spec.shape)
    return found


@contextmanager
def on_one_thread() -> Iterator[None]:
    """For the time of a `with` block torch uses one thread of the host's.

    Copies of some kilobytes gain nothing from more, whose meeting after each copy takes ten times
    the copy on a host that has other work.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def mapped_file(path: Path, *, size_bytes: int) -> Iterator[memoryview]:
    """A new file of exactly `size_bytes`, writable as memory in a `with` block.

    The blocks are reserved first: on a full tmpfs, writing to a hole would be a SIGBUS.

    Raises:
        StagingFull: the file system has no room.
    """
    with path.open("w+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise StagingFull(
                f"{path}: an export needs {size_bytes} bytes, more than are free; "
                "enlarge the file system or keep fewer versions"
            ) from error
        with mmap.mmap(file.fileno(), size_bytes) as mapped, memoryview(mapped) as view:
            yield view
