"""What each subscriber is sent, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from refit.v1 import adapter_pb2

from common.adapter import AdapterRef
from common.errors import Unavailable
from common.rules import Merge, Rules, Swap
from common.wire import ManifestReader, ref_from_proto
from tests.adapters import make_adapter
from tests.large_adapters import make_large, receive, stepped
from tests.publishing import PACE, kind, subscribed
from trainer_svc.publisher import Publisher
from trainer_svc.subscription import Parent, Subscription

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


async def test_a_late_subscriber_gets_the_current_version_at_once(publisher: Publisher) -> None:
    _publish(publisher, 1)
    newest = _publish(publisher, 2)

    update = await receive(await subscribed(publisher))

    assert update.ref == newest
    assert update.buffer == make_adapter(seed=2)[1]


async def test_before_the_first_version_heartbeats_come(publisher: Publisher) -> None:
    events = await subscribed(publisher)
    assert kind(await anext(events)) == "heartbeat"
    newest = _publish(publisher, 1)
    assert (await receive(events)).ref == newest


async def test_a_slow_subscriber_skips_to_the_newest_version(publisher: Publisher) -> None:
    events = await subscribed(publisher)
    for version in (1, 2, 3):
        _publish(publisher, version)
    assert (await receive(events)).ref.version == 3


async def test_an_update_under_way_is_finished_before_a_newer_one_begins(
    publisher: Publisher,
) -> None:
    """faults.md 4, verl#7327: nothing of two versions is ever mixed."""
    events = await subscribed(publisher)
    first = _publish(publisher, 1)
    begun = await anext(events)
    second = _publish(publisher, 2)
    rest = [await anext(events) for _ in range(3)]

    assert ref_from_proto(begun.manifest.ref) == ref_from_proto(rest[1].commit.ref) == first
    assert [kind(event) for event in rest] == ["chunk", "commit", "manifest"]
    assert ref_from_proto(rest[2].manifest.ref) == second


async def test_a_version_already_held_is_not_sent(publisher: Publisher) -> None:
    held = _publish(publisher, 1)
    events = await subscribed(publisher, Subscription(held=frozenset({held})))
    assert kind(await anext(events)) == "heartbeat"


async def test_a_version_is_sent_once_to_those_who_refuse_it(publisher: Publisher) -> None:
    subscription = Subscription()
    events = await subscribed(publisher, subscription)
    _publish(publisher, 1)
    await receive(events)
    publisher.holds(subscription, ())
    assert kind(await anext(events)) == "heartbeat"


async def test_what_the_run_has_no_more_is_retired_after_the_update(publisher: Publisher) -> None:
    """Versions over the limit and those of an earlier run alike."""
    other_run = AdapterRef("other", "default", 7, b"x" * 32)
    first = _publish(publisher, 1)
    _publish(publisher, 2)
    events = await subscribed(publisher, Subscription(held=frozenset({first, other_run})))
    newest = _publish(publisher, 3)

    assert (await receive(events)).ref == newest
    retired = [await anext(events) for _ in range(2)]
    assert {ref_from_proto(event.retire.ref) for event in retired} == {first, other_run}
    assert kind(await anext(events)) == "heartbeat"


async def test_a_pinned_version_is_retired_when_it_is_let_go(publisher: Publisher) -> None:
    """faults.md 25, prime-rl#2395."""
    pinned = _publish(publisher, 1)
    subscription = Subscription(held=frozenset({pinned}))
    events = await subscribed(publisher, subscription)
    with publisher.pinned("default", 1):
        newest = [_publish(publisher, version) for version in (2, 3)][-1]
        await receive(events)
        publisher.holds(subscription, {pinned, newest})
        assert kind(await anext(events)) == "heartbeat"
    assert ref_from_proto((await anext(events)).retire.ref) == pinned


async def test_bytes_held_under_another_name_are_an_alias(publisher: Publisher) -> None:
    held = _publish(publisher, 1)
    events = await subscribed(publisher, Subscription(held=frozenset({held})))
    alias = publisher.publish("old", *make_adapter(seed=1), version=1)

    assert ref_from_proto((await anext(events)).alias.ref) == alias
    assert kind(await anext(events)) == "heartbeat"


async def test_bytes_held_by_another_rule_of_merging_are_an_update(publisher: Publisher) -> None:
    """An alias would leave them where they are; of the bytes themselves none is sent again."""
    held = _publish(publisher, 1)
    subscription = Subscription(
        held=frozenset({held}), encodings=frozenset({adapter_pb2.ENCODING_HELD})
    )
    events = await subscribed(publisher, subscription)
    rules = Rules(Swap.CONTINUE, Merge.ROLLOUT)
    ref = publisher.publish("default", *make_adapter(seed=1), version=2, rules=rules)
    reader = ManifestReader((await anext(events)).manifest)
    assert (reader.ref, reader.rules) == (ref, rules)
    assert (await anext(events)).chunk.encoding == adapter_pb2.ENCODING_HELD
    assert ref_from_proto((await anext(events)).commit.ref) == ref
    publisher.holds(subscription, [ref])
    alias = publisher.publish("old", *make_adapter(seed=1), version=1, rules=rules)
    assert ref_from_proto((await anext(events)).alias.ref) == alias


async def test_once_the_bytes_are_gone_they_are_sent_again(publisher: Publisher) -> None:
    held = _publish(publisher, 1)
    subscription = Subscription(held=frozenset({held}))
    events = await subscribed(publisher, subscription)
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
    events = await subscribed(publisher, Subscription(wanted=frozenset({"mine"})))

    assert (await receive(events)).ref.adapter == "mine"
    assert kind(await anext(events)) == "heartbeat"


async def test_with_a_parent_only_aliases_and_retirements_come_from_here(
    publisher: Publisher,
) -> None:
    held = _publish(publisher, 1)
    subscription = Subscription(held=frozenset({held}), parent=Parent("r0", "host:1"))
    events = await subscribed(publisher, subscription)
    parent = (await anext(events)).parent
    assert (parent.replica_id, parent.address, parent.run_id) == ("r0", "host:1", "run")
    publisher.publish("old", *make_adapter(seed=1), version=1)
    assert kind(await anext(events)) == "alias"
    for version in (2, 3):
        _publish(publisher, version)
    assert ref_from_proto((await anext(events)).retire.ref) == held
    assert kind(await anext(events)) == "heartbeat"


async def test_a_broken_update_goes_on_where_it_broke(publisher: Publisher) -> None:
    newest = publisher.publish("default", *LARGE, version=1)
    events = await subscribed(publisher, Subscription(partial=(newest, 1000)))
    update = await receive(events, first=bytes(LARGE[1][:1000]))

    assert update.chunks[0].offset_bytes == 1000
    assert update.buffer == LARGE[1]


async def test_half_of_an_older_version_is_of_no_use(publisher: Publisher) -> None:
    older = publisher.publish("default", *LARGE, version=1)
    publisher.publish("default", *NEXT, version=2)
    events = await subscribed(publisher, Subscription(partial=(older, 1000)))

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
    events = await subscribed(publisher, subscription)
    if under_way:
        _publish(publisher, 1)
        assert kind(await anext(events)) == "manifest"
    waiting = asyncio.ensure_future(anext(events, None))
    if not under_way:
        await asyncio.sleep(0)
    ENDS[how](publisher, subscription)

    if how == "closed":
        assert await waiting is None
    else:
        with pytest.raises(Unavailable, match="replica_id: it was silent; subscribe again"):
            await waiting


async def test_a_message_that_is_not_taken_is_timed(publisher: Publisher) -> None:
    subscription = Subscription()
    events = await subscribed(publisher, subscription)
    await asyncio.sleep(0.05)
    assert 0.05 <= subscription.stalled_seconds() < 5
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    assert subscription.stalled_seconds() == 0
    await waiting


async def test_nothing_of_the_subscribers_grows_with_the_versions(publisher: Publisher) -> None:
    """faults.md 27, AReaL#1385."""
    subscription = Subscription()
    events = await subscribed(publisher, subscription)
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
    events = await subscribed(publisher, Subscription(partial=(cut, 1)))
    found: list[str] = []
    while len(found) < 2:
        event = await anext(events)
        if kind(event) == "manifest":
            ref = ref_from_proto(event.manifest.ref)
            found.append(f"{ref.adapter}@{ref.version}")
    assert found == order
