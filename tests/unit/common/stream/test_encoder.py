"""Deltas made once, in a thread."""

from __future__ import annotations

import gc
import weakref

from common.stream import codec
from common.stream.encoder import DeltaEncoder
from common.stream.pieces import plan_pieces
from tests.large_adapters import make_content, make_large, stepped

MADE = make_large()
BASE = make_content(MADE)


async def test_a_delta_is_made_once_and_decodes_to_the_bytes() -> None:
    encoder = DeltaEncoder()
    content = make_content(stepped(*MADE), version=2)
    piece = plan_pieces(content.manifest, held=(), base=BASE.manifest)[-1]

    future = encoder.start(content, BASE, piece, begin=piece.begin, end=piece.end)
    again = encoder.start(content, BASE, piece, begin=piece.begin, end=piece.end)
    encoder.close()

    assert again is future
    out = bytearray(piece.end - piece.begin)
    base = BASE.buffer[piece.base_begin :][: len(out)]
    codec.decode(await future, base, memoryview(out), itemsize=2)
    assert out == content.buffer[piece.begin : piece.end]
    assert len(await future) < len(out) / 20


async def test_bytes_that_no_delta_makes_fewer_are_sent_raw() -> None:
    encoder = DeltaEncoder()
    content = make_content(make_large(seed=1), version=2)
    [piece, _] = plan_pieces(content.manifest, held=(), base=BASE.manifest)

    assert await encoder.start(content, BASE, piece, begin=0, end=piece.end) == b""
    encoder.close()


async def test_deltas_go_with_their_content() -> None:
    """faults.md 27, AReaL#1385: nothing is left of a version that is gone."""
    encoder = DeltaEncoder()
    content = make_content(stepped(*MADE), version=2)
    piece = plan_pieces(content.manifest, held=(), base=BASE.manifest)[0]
    await encoder.start(content, BASE, piece, begin=0, end=piece.end)
    left = weakref.ref(content)
    del content
    gc.collect()

    assert left() is None
    encoder.close()


async def test_the_codecs_speed_is_measured() -> None:
    encoder = DeltaEncoder()
    before = encoder.bytes_per_second
    content = make_content(stepped(*MADE), version=2)
    piece = plan_pieces(content.manifest, held=(), base=BASE.manifest)[0]
    await encoder.start(content, BASE, piece, begin=0, end=piece.end)
    encoder.close()

    assert encoder.bytes_per_second != before
    assert encoder.bytes_per_second > 0.9 * before
