"""Updates that arrive as differences to a version that is here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from refit.v1 import adapter_pb2

from common.adapter import Manifest, seal
from common.errors import CorruptUpdate, NotHeld
from common.stream.content import Content
from common.stream.encoder import DeltaEncoder
from common.stream.frames import Event
from common.stream.sender import Receiver
from common.wire import MAX_CHUNK_BYTES, ref_to_proto
from tests.adapters import make_ref
from tests.fake_trainer import raw_chunk, sent_events
from tests.receiving import MANIFEST, WHOLE, Opener, check_whole, chunks, next_version, reader_of


async def delta_events(new: Content, base: Content) -> list[Event]:
    """The B factors in one piece, too small to be fewer bytes as a delta: so made by hand."""
    encoder = DeltaEncoder()
    try:
        return await sent_events(new, Receiver(base=base, encoder=encoder))
    finally:
        encoder.close()


def large(*, version: int, like: Content | None = None) -> Content:
    """An adapter whose deltas are smaller than its bytes: all zeros, but for the version."""
    if like is not None:
        return next_version(like=like, version=version)
    specs = tuple(
        replace(spec, shape=(2, 2048) if spec.layout.value == "lora_A" else (2048, 2))
        for spec in MANIFEST.tensors
    )
    ends, end = [], 0
    for spec in specs:
        ends.append(replace(spec, offset_bytes=0 if spec.alias_of else end))
        end += 0 if spec.alias_of else spec.size_bytes
    buffer = memoryview(bytes(end))
    manifest = Manifest("base", MANIFEST.lora, seal(ends, buffer))
    return Content.whole(make_ref(manifest, version=version), manifest, buffer)


async def test_a_delta_is_decoded_against_the_version_it_names(opened: Opener) -> None:
    base = large(version=1)
    new = large(version=2, like=base)
    events = await delta_events(new, base)
    assert events[0].manifest.delta_base == ref_to_proto(base.ref)
    assert {chunk.encoding for chunk in chunks(events)} == {adapter_pb2.ENCODING_DELTA_ZSTD}
    update = opened(events, held=[WHOLE, base])
    for chunk in chunks(events):
        await update.write(chunk)
    await check_whole(update, new)
    assert {key: delta.data for key, delta in update.content.deltas.items()} == {
        (base.ref.digest, chunk.offset_bytes): chunk.data for chunk in chunks(events)
    }


async def test_a_delta_to_what_is_not_here_is_not_held_and_leaves_nothing(
    opened: Opener, staging: Path
) -> None:
    base = large(version=1)
    events = await delta_events(large(version=2, like=base), base)
    with pytest.raises(NotHeld, match=r"manifest.delta_base: default@1 .* is not held here"):
        opened(events, held=[WHOLE])
    assert list(staging.iterdir()) == []


async def test_a_delta_is_gone_on_with_raw(opened: Opener) -> None:
    """A half-received update may be gone on with in another encoding, after another base."""
    base = large(version=1)
    new = large(version=2, like=base)
    events = await delta_events(new, base)
    update = opened(events, held=[base])
    await update.write(chunks(events)[0])
    done = update.received_bytes
    assert 0 < done < len(new.buffer)
    rest = await sent_events(new, Receiver(start_bytes=done))
    update.resume(reader_of(rest), held=[])
    for chunk in chunks(rest):
        await update.write(chunk)
    await check_whole(update, new)


@pytest.mark.parametrize(
    ("data", "decoded_bytes", "expected"),
    [
        (zstandard.compress(bytes(64)), 60, "a frame that claims 64 bytes"),
        (zstandard.compress(bytes(1 << 28)), 64, "a frame that claims 268435456 bytes"),
        (b"no frame", 64, "expected one zstd frame of 64 bytes"),
        (zstandard.compress(bytes(64))[:-1], 64, "expected one zstd frame of 64 bytes"),
        (zstandard.compress(bytes(64)) + b"more", 64, "expected one zstd frame of 64 bytes"),
        (zstandard.compress(bytes(66)), 66, "cuts a word of 4 bytes; send whole ones"),
    ],
)
async def test_a_delta_that_cannot_be_is_refused_before_memory_is_taken(
    opened: Opener, data: bytes, decoded_bytes: int, expected: str
) -> None:
    base = large(version=1)
    events = await delta_events(large(version=2, like=base), base)
    update = opened(events, held=[base])
    chunk = raw_chunk(0, data).chunk
    chunk.encoding, chunk.decoded_bytes = adapter_pb2.ENCODING_DELTA_ZSTD, decoded_bytes
    with pytest.raises(CorruptUpdate) as caught:
        await update.write(chunk)
    assert expected in str(caught.value)
    assert update.received_bytes == 0


async def test_a_delta_stands_for_no_more_than_a_chunk(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros compress ten thousand times: the cap bounds what one message makes of memory."""
    assert MAX_CHUNK_BYTES == 4 << 20
    monkeypatch.setattr("rollout_svc.updates.receiver.MAX_CHUNK_BYTES", 60)
    base = large(version=1)
    events = await delta_events(large(version=2, like=base), base)
    update = opened(events, held=[base])
    chunk = raw_chunk(0, zstandard.compress(bytes(64))).chunk
    chunk.encoding, chunk.decoded_bytes = adapter_pb2.ENCODING_DELTA_ZSTD, 64
    with pytest.raises(CorruptUpdate, match=r"chunk.decoded_bytes: 64; a delta is of at most 60"):
        await update.write(chunk)
