"""One update as events, whatever the other side holds and however its bytes come here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.adapter import Canary, CanarySequence, Dtype
from common.errors import Unavailable
from common.stream import sender
from common.stream.content import Content, Delta
from common.stream.encoder import DeltaEncoder
from common.stream.frames import Event
from common.stream.pieces import plan_pieces
from common.stream.sender import Pace, Receiver
from tests.large_adapters import make_content, make_large, receive, stepped
from tests.messages import as_events

OLD = make_large()
SIZE = 8 * 512 * 2
BASE = make_content(OLD)
NEW = make_content(stepped(*OLD, unchanged=[0]), version=2)
RANDOM = make_content(make_large(seed=1), version=2)


def update_events(content: Content, receiver: Receiver, *, pace: Pace) -> AsyncGenerator[Event]:
    return as_events(sender.update_events(content, receiver, pace=pace))


@pytest.fixture
async def encoder() -> AsyncIterator[DeltaEncoder]:
    encoder = DeltaEncoder()
    yield encoder
    encoder.close()


@settings(deadline=None, max_examples=60)
@given(
    chunk_bytes=st.integers(256, 1 << 20).map(lambda words: 4 * words),
    dtype=st.sampled_from(Dtype),
    start=st.floats(0, 1),
    held=st.booleans(),
    deltas=st.booleans(),
    unchanged=st.sets(st.integers(0, 3)),
)
def test_any_chunk_size_carries_the_same_bytes(
    chunk_bytes: int, dtype: Dtype, start: float, held: bool, deltas: bool, unchanged: set[int]
) -> None:
    """faults.md 4, verl#7327: an adapter that spans chunks is whole, 1 KiB to 4 MiB, from its first
    byte or wherever an update broke."""
    made = make_large(width=1024, dtype=dtype)
    base, new = make_content(made), make_content(stepped(*made, unchanged=[*unchanged]), version=2)
    start_bytes = int(start * len(new.buffer))

    async def transfer() -> bytes:
        encoder = DeltaEncoder()
        receiver = Receiver(
            held=[base] if held else (),
            base=base if deltas else None,
            start_bytes=start_bytes,
            encoder=encoder,
        )
        events = update_events(new, receiver, pace=Pace(chunk_bytes=chunk_bytes))
        update = await receive(events, held=[base], first=bytes(new.buffer[:start_bytes]))
        encoder.close()
        assert all(size <= chunk_bytes for kind, size in update.encodings() if kind != "HELD")
        return bytes(update.buffer)

    assert asyncio.run(transfer()) == new.buffer


async def test_raw_bytes_where_nothing_else_was_negotiated(encoder: DeltaEncoder) -> None:
    update = await receive(update_events(NEW, Receiver(encoder=encoder), pace=Pace()))

    assert update.encodings() == [("RAW", 4 * SIZE)]
    assert update.delta_base is None


async def test_a_held_tensor_is_not_sent() -> None:
    update = await receive(update_events(NEW, Receiver(held=[BASE]), pace=Pace()), held=[BASE])

    assert update.encodings() == [("HELD", SIZE), ("RAW", 3 * SIZE)]


async def test_what_changed_goes_as_a_difference(encoder: DeltaEncoder) -> None:
    receiver = Receiver(held=[BASE], base=BASE, encoder=encoder)
    update = await receive(update_events(NEW, receiver, pace=Pace()), held=[BASE])

    expected = [("HELD", SIZE), ("DELTA_ZSTD", SIZE), ("DELTA_ZSTD", 2 * SIZE)]
    assert update.encodings() == expected
    assert update.delta_base == BASE.ref
    assert sum(len(chunk.data) for chunk in update.chunks) < len(NEW.buffer) / 20


async def test_a_difference_is_never_larger_than_what_it_stands_for(encoder: DeltaEncoder) -> None:
    receiver = Receiver(base=BASE, encoder=encoder)
    update = await receive(update_events(RANDOM, receiver, pace=Pace()), held=[BASE])

    assert update.encodings() == [("RAW", 2 * SIZE), ("RAW", 2 * SIZE)]


async def test_a_broken_update_goes_on_at_a_word_of_the_difference(encoder: DeltaEncoder) -> None:
    receiver = Receiver(base=BASE, start_bytes=5, encoder=encoder)
    events = update_events(NEW, receiver, pace=Pace(chunk_bytes=1024))
    update = await receive(events, held=[BASE], first=bytes(NEW.buffer[:5]))

    assert update.chunks[0].offset_bytes == 5
    assert update.encodings()[:3] == [("RAW", 1023), ("DELTA_ZSTD", 1024), ("DELTA_ZSTD", 1024)]
    assert update.buffer == NEW.buffer


async def test_a_relay_passes_on_the_differences_it_got(encoder: DeltaEncoder) -> None:
    """Bytes of which it has none, or to another base, go as they are."""
    relayed = make_content(stepped(*OLD), version=2)
    piece = plan_pieces(relayed.manifest, held=(), base=BASE.manifest)[0]
    delta = await encoder.start(relayed, BASE, piece, begin=0, end=2 * SIZE)
    relayed.deltas[BASE.ref.digest, 0] = Delta(2 * SIZE, delta)
    relayed.deltas[b"another base", 2 * SIZE] = Delta(4 * SIZE, b"?")

    update = await receive(update_events(relayed, Receiver(base=BASE), pace=Pace()), held=[BASE])

    assert update.encodings() == [("DELTA_ZSTD", 2 * SIZE), ("RAW", 2 * SIZE)]
    assert update.buffer == relayed.buffer


async def test_thousands_of_tensors_take_several_small_messages() -> None:
    """faults.md 23: nothing that a model makes larger can stop a stream by its size."""
    content = make_content(make_large(tensors=10_000, width=1))
    sizes = [
        (event.WhichOneof("event"), event.ByteSize())
        async for event in update_events(content, Receiver(), pace=Pace())
    ]

    assert [kind for kind, _ in sizes] == ["manifest", *["tensors"] * 9, "chunk", "commit"]
    assert max(size for kind, size in sizes if kind != "chunk") < 256 << 10
    assert (await receive(update_events(content, Receiver(), pace=Pace()))).buffer == content.buffer


async def test_two_receivers_side_by_side_get_every_page() -> None:
    content = make_content(make_large(tensors=3000, width=1))
    updates = await asyncio.gather(
        *(receive(update_events(content, Receiver(), pace=Pace())) for _ in range(2))
    )

    assert [update.manifest for update in updates] == [content.manifest] * 2


async def test_the_canary_goes_with_the_manifest() -> None:
    canary = Canary((CanarySequence((1, 2, 3), (-0.5, -1.5)),), max_difference=0.25)
    content = Content.whole(BASE.ref, BASE.manifest, BASE.buffer, canary=canary)
    manifest = (await anext(update_events(content, Receiver(), pace=Pace()))).manifest

    assert manifest.canary.max_difference == 0.25
    assert [[*s.token_ids] for s in manifest.canary.sequences] == [[1, 2, 3]]
    assert [[*s.logprobs] for s in manifest.canary.sequences] == [[-0.5, -1.5]]


def _arriving() -> tuple[Content, AsyncGenerator[Event]]:
    content = Content(BASE.ref, BASE.manifest, BASE.buffer)
    pace = Pace(chunk_bytes=4096, heartbeat_seconds=0.02)
    return content, update_events(content, Receiver(), pace=pace)


async def test_bytes_are_passed_on_as_they_come() -> None:
    content, events = _arriving()
    assert (await anext(events)).HasField("manifest")
    next_event = asyncio.ensure_future(anext(events))
    content.advance(5000)
    assert (await next_event).chunk.data == BASE.buffer[:4096]
    assert (await anext(events)).chunk.data == BASE.buffer[4096:5000]
    assert (await anext(events)).HasField("heartbeat")
    content.advance(len(BASE.buffer))
    rest = b""
    while (event := await anext(events)).HasField("chunk"):
        rest += event.chunk.data
    assert rest == BASE.buffer[5000:]
    # All is there, and not verified yet.
    assert event.HasField("heartbeat")
    content.finish()
    while event.HasField("heartbeat"):
        event = await anext(events)
    assert event.HasField("commit")
    assert await anext(events, None) is None


@pytest.mark.parametrize("arrived_bytes", [0, 4096, 4 * SIZE])
async def test_bytes_that_will_never_come_end_the_stream(arrived_bytes: int) -> None:
    """faults.md 23, TRL#6797: a sender that dies takes nobody with it, before the commit either."""
    content, events = _arriving()
    content.advance(arrived_bytes)
    for _ in range(1 + arrived_bytes // 4096):
        await anext(events)
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    content.fail("digest differs")

    with pytest.raises(Unavailable, match=r"gave it up \(digest differs\)"):
        await waiting
