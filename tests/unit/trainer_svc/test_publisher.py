"""What each subscriber is sent, in which order and in which encoding."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import pytest
from refit.v1 import adapter_pb2

from common.adapter import AdapterRef
from common.errors import Unavailable
from common.stream.frames import Event
from common.stream.sender import Pace
from common.wire import ref_from_proto
from tests.adapters import make_adapter
from tests.large_adapters import Received, make_content, make_large, receive, stepped
from tests.messages import as_events
from trainer_svc.publisher import DeltaMode, Publisher
from trainer_svc.subscription import Parent, Subscription

PACE = Pace(heartbeat_seconds=0.02, lease_seconds=0.5)
HELD, DELTA = adapter_pb2.ENCODING_HELD, adapter_pb2.ENCODING_DELTA_ZSTD
LARGE = make_large()
NEXT = stepped(*LARGE, unchanged=[0])


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    publisher = Publisher("run", keep=2, pace=PACE)
    async with asyncio.timeout(10):
        yield publisher
    publisher.close()


def _publish(publisher: Publisher, version: int, *, adapter: str = "default") -> AdapterRef:
    return publisher.publish(adapter, *make_adapter(seed=version), version=version)


async def _subscribed(
    publisher: Publisher, subscription: Subscription | None = None
) -> AsyncGenerator[Event]:
    """A subscription past its first heartbeat."""
    events = as_events(publisher.subscribe(subscription or Subscription()))
    first = (await anext(events)).heartbeat
    assert (first.interval_seconds, first.lease_seconds) == (0.02, 0.5)
    return events


def _kind(event: Event) -> str:
    return event.WhichOneof("event") or ""


async def test_a_late_subscriber_gets_the_current_version_at_once(publisher: Publisher) -> None:
    _publish(publisher, 1)
    newest = _publish(publisher, 2)

    update = await receive(await _subscribed(publisher))

    assert update.ref == newest
    assert update.buffer == make_adapter(seed=2)[1]


async def test_before_the_first_version_heartbeats_come(publisher: Publisher) -> None:
    events = await _subscribed(publisher)
    assert _kind(await anext(events)) == "heartbeat"
    newest = _publish(publisher, 1)
    assert (await receive(events)).ref == newest


async def test_a_slow_subscriber_skips_to_the_newest_version(publisher: Publisher) -> None:
    events = await _subscribed(publisher)
    for version in (1, 2, 3):
        _publish(publisher, version)
    assert (await receive(events)).ref.version == 3


async def test_an_update_under_way_is_finished_before_a_newer_one_begins(
    publisher: Publisher,
) -> None:
    """faults.md 4, verl#7327: nothing of two versions is ever mixed."""
    events = await _subscribed(publisher)
    first = _publish(publisher, 1)
    begun = await anext(events)
    second = _publish(publisher, 2)
    rest = [await anext(events) for _ in range(3)]

    assert ref_from_proto(begun.manifest.ref) == ref_from_proto(rest[1].commit.ref) == first
    assert [_kind(event) for event in rest] == ["chunk", "commit", "manifest"]
    assert ref_from_proto(rest[2].manifest.ref) == second


async def test_a_version_already_held_is_not_sent(publisher: Publisher) -> None:
    held = _publish(publisher, 1)
    events = await _subscribed(publisher, Subscription(held=frozenset({held})))
    assert _kind(await anext(events)) == "heartbeat"


async def test_a_version_is_sent_once_to_those_who_refuse_it(publisher: Publisher) -> None:
    subscription = Subscription()
    events = await _subscribed(publisher, subscription)
    _publish(publisher, 1)
    await receive(events)
    publisher.holds(subscription, ())
    assert _kind(await anext(events)) == "heartbeat"


async def test_what_the_run_has_no_more_is_retired_after_the_update(publisher: Publisher) -> None:
    """Versions over the limit and those of an earlier run alike."""
    other_run = AdapterRef("other", "default", 7, b"x" * 32)
    first = _publish(publisher, 1)
    _publish(publisher, 2)
    events = await _subscribed(publisher, Subscription(held=frozenset({first, other_run})))
    newest = _publish(publisher, 3)

    assert (await receive(events)).ref == newest
    retired = [await anext(events) for _ in range(2)]
    assert {ref_from_proto(event.retire.ref) for event in retired} == {first, other_run}
    assert _kind(await anext(events)) == "heartbeat"


async def test_a_pinned_version_is_retired_when_it_is_let_go(publisher: Publisher) -> None:
    """faults.md 25, prime-rl#2395."""
    pinned = _publish(publisher, 1)
    subscription = Subscription(held=frozenset({pinned}))
    events = await _subscribed(publisher, subscription)
    with publisher.pinned("default", 1):
        newest = [_publish(publisher, version) for version in (2, 3)][-1]
        await receive(events)
        publisher.holds(subscription, {pinned, newest})
        assert _kind(await anext(events)) == "heartbeat"
    assert ref_from_proto((await anext(events)).retire.ref) == pinned


async def test_bytes_held_under_another_name_are_an_alias(publisher: Publisher) -> None:
    held = _publish(publisher, 1)
    events = await _subscribed(publisher, Subscription(held=frozenset({held})))
    alias = publisher.publish("old", *make_adapter(seed=1), version=1)

    assert ref_from_proto((await anext(events)).alias.ref) == alias
    assert _kind(await anext(events)) == "heartbeat"


async def test_once_the_bytes_are_gone_they_are_sent_again(publisher: Publisher) -> None:
    held = _publish(publisher, 1)
    subscription = Subscription(held=frozenset({held}))
    events = await _subscribed(publisher, subscription)
    for version in (2, 3):
        _publish(publisher, version)
    await receive(events)
    assert ref_from_proto((await anext(events)).retire.ref) == held
    publisher.publish("old", *make_adapter(seed=1), version=1)

    update = await receive(events)
    assert update.ref.adapter == "old"
    assert update.buffer == make_adapter(seed=1)[1]


async def test_only_wanted_adapters_are_sent(publisher: Publisher) -> None:
    _publish(publisher, 1, adapter="other")
    _publish(publisher, 1, adapter="mine")
    events = await _subscribed(publisher, Subscription(wanted=frozenset({"mine"})))

    assert (await receive(events)).ref.adapter == "mine"
    assert _kind(await anext(events)) == "heartbeat"


async def test_with_a_parent_only_aliases_and_retirements_come_from_here(
    publisher: Publisher,
) -> None:
    held = _publish(publisher, 1)
    subscription = Subscription(held=frozenset({held}), parent=Parent("r0", "host:1"))
    events = await _subscribed(publisher, subscription)
    parent = (await anext(events)).parent
    assert (parent.replica_id, parent.address, parent.run_id) == ("r0", "host:1", "run")
    publisher.publish("old", *make_adapter(seed=1), version=1)
    assert _kind(await anext(events)) == "alias"
    for version in (2, 3):
        _publish(publisher, version)
    assert ref_from_proto((await anext(events)).retire.ref) == held
    assert _kind(await anext(events)) == "heartbeat"


async def _second_update(publisher: Publisher, subscription: Subscription) -> Received:
    """What comes of `NEXT` to a replica that holds `LARGE`."""
    base = publisher.publish("default", *LARGE, version=1)
    subscription.held = frozenset({base})
    publisher.publish("default", *NEXT, version=2)
    update = await receive(await _subscribed(publisher, subscription), held=[make_content(LARGE)])
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

    manifest = (await anext(await _subscribed(publisher, subscription))).manifest

    assert ref_from_proto(manifest.delta_base) == held[1]
    publisher.close()


async def test_a_broken_update_goes_on_where_it_broke(publisher: Publisher) -> None:
    newest = publisher.publish("default", *LARGE, version=1)
    events = await _subscribed(publisher, Subscription(partial=(newest, 1000)))
    update = await receive(events, first=bytes(LARGE[1][:1000]))

    assert update.chunks[0].offset_bytes == 1000
    assert update.buffer == LARGE[1]


async def test_half_of_an_older_version_is_of_no_use(publisher: Publisher) -> None:
    older = publisher.publish("default", *LARGE, version=1)
    publisher.publish("default", *NEXT, version=2)
    events = await _subscribed(publisher, Subscription(partial=(older, 1000)))

    assert (await receive(events)).buffer == NEXT[1]


ENDS: dict[str, Callable[[Publisher, Subscription], None]] = {
    "closed": lambda publisher, _: publisher.close(),
    "ended": lambda publisher, subscription: publisher.end(subscription, "it was silent"),
}


@pytest.mark.parametrize("under_way", [True, False])
@pytest.mark.parametrize("how", ENDS)
async def test_a_subscription_ends_at_once(publisher: Publisher, how: str, under_way: bool) -> None:
    """faults.md 23, prime-rl#2230: in the middle of an update too, the rest is not waited for."""
    subscription = Subscription()
    events = await _subscribed(publisher, subscription)
    if under_way:
        _publish(publisher, 1)
        assert _kind(await anext(events)) == "manifest"
    waiting = asyncio.ensure_future(anext(events, None))
    if not under_way:
        await asyncio.sleep(0)
    ENDS[how](publisher, subscription)

    if how == "closed":
        assert await waiting is None
    else:
        with pytest.raises(Unavailable, match="replica_id: it was silent; subscribe again"):
            await waiting


async def test_close_does_not_break_deltas_that_are_being_made_or_wait_to_be() -> None:
    """Two bases, so that the second subscriber's deltas wait for the first one's."""
    publisher = Publisher("run", keep=3, pace=PACE, delta="always")
    large = [make_large(width=1 << 16, seed=seed) for seed in (1, 2)]
    bases = [publisher.publish("default", *m, version=v) for v, m in enumerate(large, start=1)]
    publisher.publish("default", *stepped(*large[1]), version=3)
    subscriptions = [
        Subscription(held=frozenset({base}), encodings=frozenset({DELTA})) for base in bases
    ]
    streams = [await _subscribed(publisher, subscription) for subscription in subscriptions]
    assert [_kind(await anext(events)) for events in streams] == ["manifest"] * 2
    waiting = [asyncio.ensure_future(anext(events)) for events in streams]
    await asyncio.sleep(0)
    publisher.close()

    assert [(await event).chunk.encoding for event in waiting] == [0, DELTA]
    assert [await anext(events, None) for events in streams] == [None, None]


async def test_a_message_that_is_not_taken_is_timed(publisher: Publisher) -> None:
    subscription = Subscription()
    events = await _subscribed(publisher, subscription)
    await asyncio.sleep(0.05)
    assert 0.05 <= subscription.stalled_seconds() < 5
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    assert subscription.stalled_seconds() == 0
    await waiting


async def test_nothing_of_the_subscribers_grows_with_the_versions(publisher: Publisher) -> None:
    """faults.md 27, AReaL#1385."""
    subscription = Subscription()
    events = await _subscribed(publisher, subscription)
    for version in range(1, 50):
        newest = _publish(publisher, version)
        await receive(events)
    assert subscription.sent == {"default": newest}
    await events.aclose()


@pytest.mark.parametrize(
    ("newest", "order"), [(1, ["task@1", "default@2"]), (3, ["default@2", "task@3"])]
)
async def test_the_update_that_was_cut_goes_on_first(
    publisher: Publisher, newest: int, order: list[str]
) -> None:
    """Another adapter's update would have the replica throw the received part away."""
    _publish(publisher, 2)
    cut = publisher.publish("task", *LARGE, version=1)
    if newest != 1:
        publisher.publish("task", *NEXT, version=newest)
    events = await _subscribed(publisher, Subscription(partial=(cut, 1)))
    found: list[str] = []
    while len(found) < 2:
        event = await anext(events)
        if _kind(event) == "manifest":
            ref = ref_from_proto(event.manifest.ref)
            found.append(f"{ref.adapter}@{ref.version}")
    assert found == order
