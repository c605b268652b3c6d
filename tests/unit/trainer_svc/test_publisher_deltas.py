"""In which encodings a subscriber is sent a version."""

from __future__ import annotations

import asyncio

import pytest
from refit.v1 import adapter_pb2

from common.wire import ref_from_proto
from tests.large_adapters import Received, make_content, make_large, receive, stepped
from tests.publishing import PACE, kind, subscribed
from trainer_svc.publisher import DeltaMode, Publisher
from trainer_svc.subscription import Subscription

HELD, DELTA = adapter_pb2.ENCODING_HELD, adapter_pb2.ENCODING_DELTA_ZSTD
LARGE = make_large()
NEXT = stepped(*LARGE, unchanged=[0])


async def _second_update(publisher: Publisher, subscription: Subscription) -> Received:
    """What comes of `NEXT` to a replica that holds `LARGE`."""
    base = publisher.publish("default", *LARGE, version=1)
    subscription.held = frozenset({base})
    publisher.publish("default", *NEXT, version=2)
    update = await receive(await subscribed(publisher, subscription), held=[make_content(LARGE)])
    assert update.buffer == NEXT[1]
    return update


@pytest.mark.parametrize(
    ("encodings", "expected"),
    [
        (set(), {"RAW"}),
        ({HELD}, {"HELD", "RAW"}),
        ({DELTA}, {"DELTA_ZSTD"}),
        ({HELD, DELTA}, {"HELD", "DELTA_ZSTD"}),
    ],
)
async def test_no_encoding_is_sent_that_was_not_negotiated(
    encodings: set[adapter_pb2.Encoding], expected: set[str]
) -> None:
    publisher = Publisher("run", keep=2, pace=PACE, delta="always")
    update = await _second_update(publisher, Subscription(encodings=frozenset(encodings)))

    assert {name for name, _ in update.encodings()} == expected
    publisher.close()


@pytest.mark.parametrize(
    ("mode", "link_bytes_per_second", "deltas"),
    [
        ("never", 1e3, False),
        ("always", 1e12, True),
        ("auto", 1e3, True),
        ("auto", 1e12, False),
        ("auto", None, False),
    ],
)
async def test_deltas_go_over_links_slower_than_the_codec(
    mode: DeltaMode, link_bytes_per_second: float | None, deltas: bool
) -> None:
    publisher = Publisher("run", keep=2, pace=PACE, delta=mode)
    subscription = Subscription(encodings=frozenset({DELTA}))
    if link_bytes_per_second:
        subscription.measured(wire_bytes=1 << 20, wire_seconds=(1 << 20) / link_bytes_per_second)
    subscription.measured(wire_bytes=1 << 19, wire_seconds=1e9)  # too few to tell
    update = await _second_update(publisher, subscription)

    assert (update.delta_base is not None) == deltas
    publisher.close()


async def test_deltas_are_taken_to_the_newest_held_version_of_the_same_adapter() -> None:
    publisher = Publisher("run", keep=3, pace=PACE, delta="always")
    other = publisher.publish("other", *make_large(seed=5), version=9)
    held = [publisher.publish("default", *make_large(seed=v), version=v) for v in (1, 2)]
    publisher.publish("default", *NEXT, version=3)
    subscription = Subscription(held=frozenset({other, *held}), encodings=frozenset({DELTA}))

    manifest = (await anext(await subscribed(publisher, subscription))).manifest

    assert ref_from_proto(manifest.delta_base) == held[1]
    publisher.close()


async def test_close_does_not_break_deltas_that_are_being_made_or_wait_to_be() -> None:
    """Two bases, so that the second subscriber's deltas wait for the first one's."""
    publisher = Publisher("run", keep=3, pace=PACE, delta="always")
    large = [make_large(width=1 << 16, seed=seed) for seed in (1, 2)]
    bases = [publisher.publish("default", *m, version=v) for v, m in enumerate(large, start=1)]
    publisher.publish("default", *stepped(*large[1]), version=3)
    subscriptions = [
        Subscription(held=frozenset({base}), encodings=frozenset({DELTA})) for base in bases
    ]
    streams = [await subscribed(publisher, subscription) for subscription in subscriptions]
    assert [kind(await anext(events)) for events in streams] == ["manifest"] * 2
    waiting = [asyncio.ensure_future(anext(events)) for events in streams]
    await asyncio.sleep(0)
    publisher.close()

    assert [(await event).chunk.encoding for event in waiting] == [0, DELTA]
    assert [await anext(events, None) for events in streams] == [None, None]
