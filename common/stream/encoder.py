"""Deltas made in threads, once for all receivers, by a codec whose speed is measured."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

from common.stream import codec
from common.stream.content import Content
from common.stream.pieces import Piece

_FIRST_GUESS_BYTES_PER_SECOND = 250e6
_WEIGHT = 0.1

Key = tuple[bytes, int, int]


class DeltaEncoder:
    """Encodes pieces of a content against a base; empty bytes mean that raw ones are fewer.

        data = await encoder.start(content, base, piece, begin=0, end=1 << 20)

    Results stay as long as the content does: for each base fewer bytes than its buffer has.
    """

    def __init__(self) -> None:
        self.bytes_per_second = _FIRST_GUESS_BYTES_PER_SECOND
        """Raw bytes that one thread turns into deltas; a moving average."""

        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="delta")
        self._made: WeakKeyDictionary[Content, dict[Key, asyncio.Future[bytes]]]
        self._made = WeakKeyDictionary()

    def start(
        self, content: Content, base: Content, piece: Piece, *, begin: int, end: int
    ) -> asyncio.Future[bytes]:
        """The future of bytes `begin` to `end` of `content`, which lie within `piece`."""
        made = self._made.setdefault(content, {})
        key = base.ref.digest, begin, end
        if key not in made:
            shift = piece.base_begin - piece.begin
            made[key] = asyncio.get_running_loop().run_in_executor(
                self._pool,
                self._encode,
                content.buffer[begin:end],
                base.buffer[begin + shift : end + shift],
                piece.itemsize,
            )
        return made[key]

    def close(self) -> None:
        """Take nothing more; who waits for a delta still gets it."""
        self._pool.shutdown(wait=False)

    def _encode(self, new: memoryview, base: memoryview, itemsize: int) -> bytes:
        begun = time.perf_counter()
        data = codec.encode(new, base, itemsize=itemsize)
        speed = len(new) / max(time.perf_counter() - begun, 1e-9)
        self.bytes_per_second += _WEIGHT * (speed - self.bytes_per_second)
        return data if len(data) < len(new) else b""
