"""The lossless difference, and what its decoder refuses."""

from __future__ import annotations

import random
import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from common.errors import CorruptUpdate
from common.stream.codec import decode, encode

_SIZE_BYTES = 4096
_UNTOUCHED = b"\xaa" * _SIZE_BYTES


def _decoded(data: bytes, base: bytes, *, itemsize: int = 2) -> bytes:
    out = bytearray(len(base))
    decode(data, memoryview(base), memoryview(out), itemsize=itemsize)
    return bytes(out)


def _random(seed: int, size_bytes: int = _SIZE_BYTES) -> bytes:
    return np.random.default_rng(seed).bytes(size_bytes)


def _skewed() -> bytes:
    """Bytes that zstd codes by Huffman, as it does the planes of a small step."""
    return np.random.default_rng(0).binomial(8, 0.5, _SIZE_BYTES).astype(np.uint8).tobytes()


def _frame(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(content)


@pytest.mark.parametrize("itemsize", [2, 4])
@given(words=st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 2), min_size=1, max_size=50))
def test_every_word_comes_back_whatever_both_versions_are(
    itemsize: int, words: list[tuple[int, int]]
) -> None:
    new, base = (struct.pack(f"<{len(words)}I", *column) for column in zip(*words, strict=True))

    data = encode(memoryview(new), memoryview(base), itemsize=itemsize)

    assert _decoded(data, base, itemsize=itemsize) == new


@pytest.mark.parametrize(
    ("itemsize", "base", "new", "content"),
    [
        (2, (7, 6, 0x100, 0x7FFF), (8, 5, 0x80, 0xBFFF), "02 01 ff 00  00 00 00 80"),
        (4, (8, 0x01020304), (0x01000008, 0x01020302), "00 03  00 00  00 00  02 00"),
    ],
)
def test_the_frame_holds_zigzag_differences_lowest_bytes_first(
    itemsize: int, base: tuple[int, ...], new: tuple[int, ...], content: str
) -> None:
    """What goes over the wire, so that another implementation can write it."""
    old, words = (np.array(values, f"<u{itemsize}").tobytes() for values in (base, new))

    data = encode(memoryview(words), memoryview(old), itemsize=itemsize)

    assert zstandard.ZstdDecompressor().decompress(data) == bytes.fromhex(content)


def test_unaligned_views_work() -> None:
    new, base, out = b"x" + _random(1), b"yyy" + _random(2), bytearray(1 + _SIZE_BYTES)

    data = encode(memoryview(new)[1:], memoryview(base)[3:], itemsize=4)
    decode(data, memoryview(base)[3:], memoryview(out)[1:], itemsize=4)

    assert out == b"\0" + new[1:]


def test_a_step_of_a_few_units_in_the_last_place_costs_less_than_its_xor() -> None:
    rng = np.random.default_rng(0)
    base = (rng.normal(size=1 << 16).astype("<f4").view("<u4") >> 16).astype("<u2")
    new = base + rng.integers(-4, 5, base.size).astype("<u2")

    size = len(encode(new.data, base.data, itemsize=2))

    xor = (new ^ base).view(np.uint8).reshape(-1, 2).T.tobytes()
    assert size < 0.9 * len(_frame(xor))
    assert size < 0.25 * base.nbytes


def _unsized(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(content)


def _skippable(size_bytes: int) -> bytes:
    return struct.pack("<II", 0x184D2A50, size_bytes) + bytes(size_bytes)


def _header(*, size_bytes: int, window_log: int) -> bytes:
    """A frame with a window of its own and an eight-byte size, cut off after its first block."""
    window = (window_log - 10) << 3
    return struct.pack("<IBBQ", 0xFD2FB528, 0xC0, window, size_bytes) + b"\x02\0\0\0\0"


REFUSED = {
    "empty": b"",
    "no zstd": b"nothing that zstd wrote",
    "cut": _frame(_random(0))[:-1],
    "garbage behind": _frame(_random(0)) + b"\0",
    "two frames": _frame(_random(0)) * 2,
    "shorter": _frame(_random(0)[:-2]),
    "longer": _frame(_random(0) + b"\0\0"),
    "no size": _unsized(_random(0)),
    "skippable": _skippable(_SIZE_BYTES),
    "bomb": _frame(bytes(1 << 24)),
    "claims an exabyte": _header(size_bytes=1 << 60, window_log=20),
    "window of a terabyte": _header(size_bytes=_SIZE_BYTES, window_log=40),
    "window of 128 MiB": _header(size_bytes=_SIZE_BYTES, window_log=27),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_one_frame_of_the_right_size_is_refused(name: str) -> None:
    """What a frame claims is not allocated (as far as Python counts), and `out` is untouched."""
    out = bytearray(_UNTOUCHED)

    tracemalloc.start()
    try:
        with pytest.raises(CorruptUpdate, match=f"one zstd frame of {_SIZE_BYTES} bytes"):
            decode(REFUSED[name], memoryview(_random(1)), memoryview(out), itemsize=2)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert out == _UNTOUCHED
    assert peak_bytes < 1 << 20


_FRAMES = [
    _frame(content)
    for content in (
        _random(0),
        bytes(range(64)) * (_SIZE_BYTES // 64),
        bytes(_SIZE_BYTES),
        _skewed(),
    )
]


def test_a_mutated_frame_decodes_or_is_refused() -> None:
    """Nothing but CorruptUpdate comes out of the decoder, and an output is whole or untouched."""
    rng = random.Random(0)
    base = memoryview(bytes(_SIZE_BYTES))
    refused = 0
    for _ in range(5000):
        out = bytearray(_UNTOUCHED)
        try:
            decode(_mutated(rng.choice(_FRAMES), rng), base, memoryview(out), itemsize=2)
        except CorruptUpdate:
            refused += 1
            assert out == _UNTOUCHED
    assert 2500 < refused < 5000


def _mutated(frame: bytes, rng: random.Random) -> bytes:
    """`frame` cut or lengthened now and then, and with a few bytes changed, mostly early ones."""
    mutated = bytearray(frame)
    if rng.random() < 0.2:
        del mutated[rng.randrange(1, len(mutated)) :]
    if rng.random() < 0.1:
        mutated += rng.randbytes(rng.randrange(1, 8))
    for _ in range(rng.randrange(1, 4)):
        position = rng.randrange(min(len(mutated), rng.choice((16, 128, _SIZE_BYTES))))
        mutated[position] = rng.randrange(256)
    return bytes(mutated)
