"""Lossless difference of two versions of the same tensors.

Each word of the new version, read as an integer, minus the old version's: neighbouring floats of
one sign are neighbouring integers, so a small step is a small number, which XOR would spread over
all the bits that a carry reaches. Zigzag then folds the sign into the lowest bit (0, -1, 1, -2 are
0, 1, 2, 3), the bytes of equal significance are put together, all lowest ones first, and zstd
compresses the whole.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from common.errors import CorruptUpdate

_WORDS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_LEVEL = 1

Words = NDArray[Any]


class _Zstd(threading.local):
    """A thread's own contexts: zstandard's are not to be shared, and dear to make."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def encode(new: memoryview, base: memoryview, *, itemsize: int) -> bytes:
    """`new` as a zstd frame that `decode` turns back with the same `base`.

    Args:
        new: whole little-endian words; need not be aligned.
        base: as many bytes, of the version that the receiver holds.
        itemsize: bytes a word, 2 or 4.
    """
    words = np.frombuffer(new, _WORDS[itemsize]) - np.frombuffer(base, _WORDS[itemsize])
    return _zstd.compressor.compress(_planes(_zigzag(words)).data)


def decode(data: bytes | memoryview, base: memoryview, out: memoryview, *, itemsize: int) -> None:
    """Inverse of `encode`, into `out`; takes a few times its size of memory whatever `data` is.

    `out` is untouched on an error.

    Raises:
        CorruptUpdate: `data` is not one zstd frame of as many bytes as `out`.
    """
    word = _WORDS[itemsize]
    words = _unzigzag(_joined(_decompress(data, size_bytes=out.nbytes), itemsize=itemsize))
    np.add(words, np.frombuffer(base, word), out=np.frombuffer(out, word))


def _zigzag(words: Words) -> Words:
    return (words << 1) ^ -(words >> (8 * words.itemsize - 1))


def _unzigzag(words: Words) -> Words:
    return (words >> 1) ^ -(words & 1)


def _planes(words: Words) -> NDArray[np.uint8]:
    """Bytes of `words`, (itemsize, number of words), lowest significance first."""
    planes = np.empty((words.itemsize, words.size), np.uint8)
    for index, plane in enumerate(planes):
        np.right_shift(words, 8 * index, out=plane, casting="unsafe")
    return planes


def _joined(data: bytes, *, itemsize: int) -> Words:
    planes = np.frombuffer(data, np.uint8).reshape(itemsize, -1)
    words: Words = planes[0].astype(_WORDS[itemsize])
    for index, plane in enumerate(planes[1:], start=1):
        words |= plane.astype(words.dtype) << (8 * index)
    return words


def _decompress(data: bytes | memoryview, *, size_bytes: int) -> bytes:
    """The frame's content; its header is checked first, since memory is taken by what it says."""
    try:
        claimed_bytes = zstandard.get_frame_parameters(data).content_size
        if claimed_bytes == size_bytes:
            return _zstd.decompressor.decompress(data, allow_extra_data=False)
        found = f"a frame that claims {claimed_bytes} bytes"
    except zstandard.ZstdError as error:
        found = str(error)
    raise CorruptUpdate(
        f"chunk.data: {found}; expected one zstd frame of {size_bytes} bytes, send the update again"
    )
