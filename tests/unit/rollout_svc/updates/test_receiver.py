"""One update, chunk by chunk, in every encoding."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from refit.v1 import adapter_pb2

from common.adapter import AdapterRef, Manifest
from common.errors import CorruptUpdate, InvalidField, NotHeld, Unavailable, WrongDigest
from common.stream.content import Content
from common.stream.sender import Receiver
from common.wire import crc32c, ref_to_proto
from rollout_svc.updates import receiver
from tests.adapters import make_ref
from tests.fake_trainer import raw_chunk, sent_events, update_events
from tests.receiving import (
    BUFFER,
    MANIFEST,
    WHOLE,
    Opener,
    check_whole,
    chunks,
    events_of,
    held_chunk,
    next_version,
    reader_of,
)

COMMIT = adapter_pb2.AdapterCommit(ref=ref_to_proto(WHOLE.ref))


@pytest.mark.parametrize("chunk_bytes", [1, 7, 50, 1024, 1 << 30])
async def test_any_chunk_size_gives_the_same_file(opened: Opener, chunk_bytes: int) -> None:
    """faults.md 4, verl#7327: what is staged does not depend on where the stream was cut."""
    events = events_of(WHOLE, chunk_bytes=chunk_bytes)
    update = opened(events)
    for chunk in chunks(events):
        await update.write(chunk)
    await check_whole(update, WHOLE)


async def test_what_has_arrived_can_be_read_and_nothing_else_is_told(opened: Opener) -> None:
    events = events_of(WHOLE)
    update = opened(events)
    for end, chunk in zip((50, 100, 150, 160), chunks(events), strict=True):
        await update.write(chunk)
        assert update.received_bytes == update.content.arrived_bytes == end
        assert bytes(update.content.buffer[:end]) == bytes(BUFFER[:end])
        assert not update.content.finished
    await update.finish(COMMIT)
    assert update.content.finished


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"offset_bytes": 0}, "chunk.offset_bytes: 0 of default@1"),
        ({"offset_bytes": 100}, "but 50 bytes came so far; send it again"),
        ({"offset_bytes": -1}, "chunk.offset_bytes: -1"),
        ({"offset_bytes": 1 << 62}, "but 50 bytes came so far"),
        ({"data": b""}, "chunk.data: ends at 50 of default@1"),
        ({"data": bytes(111)}, "a chunk is not empty and ends within the manifest's 160 bytes"),
        ({"decoded_bytes": 4}, "chunk.decoded_bytes: 4, but 50 raw bytes came"),
        ({"decoded_bytes": -4}, "chunk.data: ends at 46"),
        ({"decoded_bytes": (1 << 63) - 1}, "ends within the manifest's 160 bytes"),
        ({"crc32c": 1}, "chunk.crc32c: differs from that of the data at 50 of default@1"),
        ({"encoding": adapter_pb2.ENCODING_DELTA_ZSTD}, "have no counterpart in its base"),
    ],
)
async def test_a_chunk_that_is_not_the_next_one_changes_nothing_and_may_come_again(
    opened: Opener, changes: dict[str, object], expected: str
) -> None:
    events = events_of(WHOLE)
    update = opened(events)
    first, second, *others = chunks(events)
    await update.write(first)
    wrong = adapter_pb2.AdapterChunk.FromString(second.SerializeToString())
    for name, value in changes.items():
        setattr(wrong, name, value)
    if "crc32c" not in changes:
        wrong.crc32c = crc32c(wrong.data)

    with pytest.raises(CorruptUpdate) as caught:
        await update.write(wrong)
    assert expected in str(caught.value)

    assert update.received_bytes == 50
    for chunk in (second, *others):
        await update.write(chunk)
    await check_whole(update, WHOLE)


async def test_an_encoding_of_the_future_is_refused(opened: Opener) -> None:
    update = opened(events_of(WHOLE))
    chunk = raw_chunk(0, bytes(BUFFER)).chunk
    chunk.encoding = 9  # type: ignore[assignment]
    with pytest.raises(InvalidField, match=r"chunk.encoding: 9 is none this version knows"):
        await update.write(chunk)
    assert update.received_bytes == 0


async def test_bytes_that_are_not_what_was_published_are_named(opened: Opener) -> None:
    """Their checksum on the way is right; only the digest tells."""
    events = events_of(WHOLE)
    update = opened(events)
    await update.write(raw_chunk(0, bytes(BUFFER[:64])).chunk)
    with pytest.raises(WrongDigest, match=r"q_proj.lora_B.weight': BLAKE3 \w{12} instead of"):
        await update.write(raw_chunk(64, bytes(96)).chunk)


async def test_a_commit_with_a_hole_or_another_name_changes_nothing(opened: Opener) -> None:
    """faults.md 4, verl#7327: a commit before the last byte is no commit."""
    events = events_of(WHOLE)
    update = opened(events)
    first, *others = chunks(events)
    await update.write(first)
    with pytest.raises(CorruptUpdate, match=r"commit: 50 of 160 bytes of default@1 .* arrived"):
        await update.finish(COMMIT)
    for chunk in others:
        await update.write(chunk)
    another = adapter_pb2.AdapterCommit(ref=ref_to_proto(make_ref(MANIFEST, version=2)))
    with pytest.raises(CorruptUpdate, match=r"commit.ref: not that of the open update"):
        await update.finish(another)
    await check_whole(update, WHOLE)


async def test_tensors_that_are_held_are_copied_whatever_their_place(opened: Opener) -> None:
    new = next_version(like=WHOLE)
    events = await sent_events(new, Receiver(held=[WHOLE]))
    encodings = [(chunk.encoding, len(chunk.data)) for chunk in chunks(events)]
    assert encodings == [(adapter_pb2.ENCODING_HELD, 0), (adapter_pb2.ENCODING_UNSPECIFIED, 96)]
    update = opened(events, held=[WHOLE])
    for chunk in chunks(events):
        await update.write(chunk)
    await check_whole(update, new)


@pytest.mark.parametrize("received_bytes", [1, 64, 70, 159])
async def test_the_rest_of_a_held_tensor_is_copied(opened: Opener, received_bytes: int) -> None:
    update = opened(events_of(WHOLE), held=[WHOLE])
    await update.write(raw_chunk(0, bytes(BUFFER[:received_bytes])).chunk)
    await update.write(held_chunk(received_bytes, 160))
    await check_whole(update, WHOLE)


async def test_what_is_taken_for_held_and_is_not_is_named(opened: Opener) -> None:
    update = opened(events_of(next_version(like=WHOLE)), held=[WHOLE])
    await update.write(held_chunk(0, 64))
    with pytest.raises(NotHeld, match=r"q_proj.lora_B.weight': the sender takes it for held"):
        await update.write(held_chunk(64, 160))
    assert update.received_bytes == 64


async def test_a_held_digest_under_another_size_is_a_lie(opened: Opener) -> None:
    """The last tensor is claimed to be longer than what its digest names."""
    *specs, last = MANIFEST.tensors
    longer = replace(last, shape=(last.shape[0] + 1, last.shape[1]))
    manifest = Manifest("base", MANIFEST.lora, (*specs, longer))
    lie = Content.whole(make_ref(manifest), manifest, memoryview(bytes(168)))
    update = opened(events_of(lie), held=[WHOLE])
    with pytest.raises(WrongDigest, match="40 bytes with the digest of 32 others"):
        await update.write(held_chunk(0, 168))


async def test_held_tensors_are_copied_in_slices_and_each_is_whole(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled in between, an update goes on from what it has told of."""
    monkeypatch.setattr(receiver, "_SLICE_BYTES", 1)
    update = opened(events_of(WHOLE), held=[WHOLE])
    writing = asyncio.ensure_future(update.write(held_chunk(0, 160)))
    await asyncio.sleep(0)
    assert update.received_bytes == 64
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert update.received_bytes == 64
    await update.write(raw_chunk(64, bytes(BUFFER[64:])).chunk)
    await check_whole(update, WHOLE)


async def test_what_is_given_up_leaves_nothing_and_tells_who_waits_for_it(
    opened: Opener, staging: Path
) -> None:
    update = opened(events_of(WHOLE))
    waiting = asyncio.ensure_future(update.content.arrived_beyond(0, timeout_seconds=5))
    await asyncio.sleep(0)
    update.discard("it was replaced")
    with pytest.raises(Unavailable, match=r"this relay gave it up \(it was replaced\)"):
        await waiting
    assert list(staging.iterdir()) == []


async def test_the_time_without_a_stream_is_no_time_on_the_wire(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer takes bytes by these seconds for the speed of the link."""
    now_seconds = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now_seconds[0])
    monkeypatch.setattr(receiver, "time", clock)
    events = events_of(WHOLE, chunk_bytes=80)
    update = opened(events)
    first, second = chunks(events)
    now_seconds[0] += 2
    await update.write(first)
    now_seconds[0] += 600
    update.resume(reader_of(events), held=())
    now_seconds[0] += 3
    await update.write(second)
    now_seconds[0] += 50
    staged = await update.finish(COMMIT)
    assert staged.wire_seconds == 5.0


async def test_a_cancelled_finish_ends_with_its_thread_and_can_be_repeated(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever discards the update next must not close a file that a thread writes to."""
    update = opened(events_of(WHOLE))
    await update.write(raw_chunk(0, bytes(BUFFER)).chunk)
    may_write, finish = threading.Event(), update._writer.finish
    with monkeypatch.context() as patched:
        patched.setattr(update._writer, "finish", lambda: may_write.wait(timeout=5) and finish())
        finishing = asyncio.ensure_future(update.finish(COMMIT))
        await asyncio.sleep(0.01)
        finishing.cancel()
        await asyncio.sleep(0.01)
        assert not finishing.done()
        may_write.set()
        with pytest.raises(asyncio.CancelledError):
            await finishing
    assert update._writer._file.closed
    await check_whole(update, WHOLE)


async def test_the_bytes_of_a_committed_version_cannot_be_overwritten(opened: Opener) -> None:
    """faults.md 21, verl#6688: no receive buffer is used again, and none can be written to."""
    update = opened(events_of(WHOLE))
    await update.write(raw_chunk(0, bytes(BUFFER)).chunk)
    staged = await update.finish(COMMIT)
    with pytest.raises(TypeError):
        staged.content.buffer[0] = 1
    with pytest.raises(CorruptUpdate):
        await update.write(raw_chunk(0, bytes(160)).chunk)
    assert bytes(staged.content.buffer) == bytes(BUFFER)


async def test_a_table_that_claims_more_than_is_taken_allocates_nothing(
    opened: Opener, staging: Path
) -> None:
    specs = tuple(
        replace(spec, shape=(2, 1 << 40) if spec.layout.value == "lora_A" else (1 << 40, 2))
        for spec in MANIFEST.tensors[:1]
    )
    manifest = Manifest("base", MANIFEST.lora, specs)
    lie = Content(AdapterRef("run", "default", 1, manifest.digest()), manifest, memoryview(b""))
    with pytest.raises(Exception, match="raise max_update_bytes"):
        opened(list(update_events(lie.ref, manifest, lie.buffer)))
    assert list(staging.iterdir()) == []
