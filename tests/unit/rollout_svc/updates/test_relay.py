"""A replica as a source: what its children get, and when they are sent back to the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import pytest
from refit.v1 import adapter_pb2, version_pb2

from common.adapter import AdapterRef
from common.errors import Incompatible, InvalidField, QueueFull, RefitError, Unavailable
from common.stream.content import Content
from common.stream.frames import Event, Message
from common.stream.sender import Receiver
from common.wire import ref_to_proto
from rollout_svc.engine import BoundReport
from rollout_svc.updates.applier import UpdateApplier
from rollout_svc.updates.relay import Relay
from rollout_svc.versions.registry import AdapterRegistry
from tests.adapters import make_adapter, make_ref
from tests.fake_engine import FakeEngine
from tests.fake_trainer import raw_chunk, sent_events, update_events
from tests.messages import as_event
from tests.receiving import next_version, prepare_deltas

ENCODINGS = [adapter_pb2.ENCODING_HELD, adapter_pb2.ENCODING_DELTA_ZSTD]


def content(version: int = 1) -> Content:
    manifest, buffer = make_adapter(seed=version)
    return Content.whole(make_ref(manifest, version=version), manifest, buffer)


def events_of(whole: Content, *, chunk_bytes: int = 64) -> list[Event]:
    return list(update_events(whole.ref, whole.manifest, whole.buffer, chunk_bytes=chunk_bytes))


def request(
    *,
    held: list[AdapterRef] | None = None,
    partial: adapter_pb2.PartialUpdate | None = None,
    run_id: str = "run",
    fingerprint: str = "base",
    adapters: tuple[str, ...] = (),
) -> adapter_pb2.AdapterUpdateRequest:
    return adapter_pb2.AdapterUpdateRequest(
        run_id=run_id,
        base_model=version_pb2.BaseModel(fingerprint=fingerprint),
        capabilities=adapter_pb2.ReplicaCapabilities(encodings=ENCODINGS),
        held=[ref_to_proto(ref) for ref in held or []],
        partial=partial,
        adapters=adapters,
    )


async def next_event(events: AsyncGenerator[Message]) -> Event:
    """The next one that is no heartbeat."""
    async with asyncio.timeout(2):
        while True:
            event = as_event(await anext(events))
            if not event.HasField("heartbeat"):
                return event


async def next_update(events: AsyncGenerator[Message]) -> list[Event]:
    found = [await next_event(events)]
    while not found[-1].HasField("commit"):
        found.append(await next_event(events))
    return found


async def silent(events: AsyncGenerator[Message]) -> None:
    """Nothing but heartbeats, two of them."""
    for _ in range(2):
        assert as_event(await anext(events)).heartbeat.interval_seconds == 0.05


async def apply_all(applier: UpdateApplier, events: list[Event]) -> None:
    for event in events:
        await applier.apply(event)


async def test_what_is_served_is_passed_on_and_then_what_comes(
    relay: Relay, applier: UpdateApplier
) -> None:
    one, two = content(1), content(2)
    await apply_all(applier, events_of(one))
    async with aclosing(relay.subscribe(request())) as events:
        assert as_event(await anext(events)).HasField("heartbeat")
        assert await next_update(events) == events_of(one)
        await silent(events)
        await apply_all(applier, events_of(two))
        assert await next_update(events) == events_of(two)
        await silent(events)


async def test_chunks_are_passed_on_as_they_arrive(relay: Relay, applier: UpdateApplier) -> None:
    """Cut-through: the child has every byte that the relay has, and no commit before its own."""
    whole = content()
    expected = events_of(whole)
    async with aclosing(relay.subscribe(request())) as events:
        await silent(events)
        for event in expected[:-1]:
            await applier.apply(event)
            assert await next_event(events) == event
        await silent(events)
        await applier.apply(expected[-1])
        assert await next_event(events) == expected[-1]


async def test_a_suspended_update_goes_on_where_it_was(
    relay: Relay, applier: UpdateApplier
) -> None:
    whole = content()
    expected = events_of(whole)
    async with aclosing(relay.subscribe(request())) as events:
        await anext(events)
        await apply_all(applier, expected[:2])
        assert [await next_event(events) for _ in range(2)] == expected[:2]
        applier.suspend()
        await silent(events)
        rest = await sent_events(whole, Receiver(start_bytes=64), chunk_bytes=64)
        await apply_all(applier, rest)
        assert [await next_event(events) for _ in range(3)] == expected[2:]


async def test_a_child_goes_on_from_what_it_has(relay: Relay, applier: UpdateApplier) -> None:
    whole = content()
    await apply_all(applier, events_of(whole))
    half = adapter_pb2.PartialUpdate(ref=ref_to_proto(whole.ref), received_bytes=100)
    async with aclosing(relay.subscribe(request(partial=half))) as events:
        _, first, _ = await next_update(events)
    assert first == raw_chunk(100, bytes(whole.buffer[100:]))


async def test_tensors_that_the_child_holds_are_not_sent(
    relay: Relay, applier: UpdateApplier
) -> None:
    one = content(1)
    two = next_version(like=one)
    await apply_all(applier, [*events_of(one), *events_of(two)])
    async with aclosing(relay.subscribe(request(held=[one.ref]))) as events:
        update = await next_update(events)
    chunks = [event.chunk for event in update if event.HasField("chunk")]
    assert [(c.encoding, c.decoded_bytes, len(c.data)) for c in chunks] == [
        (adapter_pb2.ENCODING_HELD, 64, 0),
        *[(adapter_pb2.ENCODING_UNSPECIFIED, 0, size) for size in (64, 32)],
    ]


async def test_a_delta_is_passed_on_as_it_came(relay: Relay, applier: UpdateApplier) -> None:
    """To whom has its base; another child gets the bytes."""
    one = content(1)
    two = next_version(like=one)
    prepare_deltas(two, base=one)
    delta = await sent_events(two, Receiver(held=[one], base=one))
    await apply_all(applier, events_of(one))
    async with (
        aclosing(relay.subscribe(request(held=[one.ref]))) as has_base,
        aclosing(relay.subscribe(request(adapters=("default",)))) as has_not,
    ):
        await anext(has_base)
        await apply_all(applier, delta)
        assert await next_update(has_base) == delta
        assert await next_update(has_not) == events_of(two)


@pytest.mark.parametrize("version", [1, 2])
async def test_a_child_that_is_ahead_is_not_sent_older_bytes(
    relay: Relay, applier: UpdateApplier, version: int
) -> None:
    await apply_all(applier, events_of(content(1)))
    async with aclosing(relay.subscribe(request(held=[content(version).ref]))) as events:
        await silent(events)
        await apply_all(applier, events_of(content(3)))
        assert (await next_event(events)).manifest.ref == ref_to_proto(content(3).ref)


async def test_an_alias_is_left_to_the_trainer(
    relay: Relay, applier: UpdateApplier, registry: AdapterRegistry
) -> None:
    await apply_all(applier, events_of(content(1)))
    await registry.alias(AdapterRef("run", "old", 1, content(1).ref.digest), source="trainer")
    async with aclosing(relay.subscribe(request())) as events:
        await next_update(events)
        await silent(events)


async def test_a_child_gets_what_it_asked_for(relay: Relay, applier: UpdateApplier) -> None:
    await apply_all(applier, events_of(content(1)))
    async with (
        aclosing(relay.subscribe(request(run_id="another"))) as another_run,
        aclosing(relay.subscribe(request(adapters=("old",)))) as another_adapter,
    ):
        await silent(another_run)
        await silent(another_adapter)


@pytest.mark.parametrize(
    ("asked", "error", "expected"),
    [
        (request(run_id=""), InvalidField, "run_id: empty; say which run to relay"),
        (request(fingerprint="x"), Incompatible, "base_model: fingerprint 'x', this relay serves"),
        (
            request(partial=adapter_pb2.PartialUpdate(received_bytes=-1)),
            InvalidField,
            "partial.received_bytes: -1; at least 0",
        ),
        (
            request(held=[replace(content().ref, digest=b"short")]),
            InvalidField,
            "ref.digest: 5 bytes",
        ),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused(
    relay: Relay,
    asked: adapter_pb2.AdapterUpdateRequest,
    error: type[RefitError],
    expected: str,
) -> None:
    async with aclosing(relay.subscribe(asked)) as events:
        with pytest.raises(error) as caught:
            await anext(events)
    assert expected in str(caught.value)


async def test_there_are_as_many_children_as_are_taken(relay: Relay) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(2):
            events = await stack.enter_async_context(aclosing(relay.subscribe(request())))
            await anext(events)
        third = relay.subscribe(request())
        with pytest.raises(QueueFull, match="max_children: this relay serves 2 replicas"):
            await anext(third)
    async with aclosing(relay.subscribe(request())) as events:
        await silent(events)


async def test_an_update_that_is_refused_here_sends_who_waits_for_it_away(
    relay: Relay, applier: UpdateApplier
) -> None:
    """Refused by its manifest, it never arrives; the trainer brings it to the children itself."""
    applier.limits = replace(applier.limits, max_bytes=10)
    async with aclosing(relay.subscribe(request())) as events:
        await anext(events)
        await applier.apply(events_of(content(1))[0])
        with pytest.raises(Unavailable, match=r"this relay refused an update: manifest\.tensors"):
            await next_event(events)


async def test_bytes_that_turn_out_wrong_send_who_has_some_of_them_away(
    relay: Relay, applier: UpdateApplier
) -> None:
    update = events_of(content(1))
    async with aclosing(relay.subscribe(request())) as events:
        await anext(events)
        await apply_all(applier, update[:2])
        assert [await next_event(events) for _ in range(2)] == update[:2]
        await applier.apply(raw_chunk(64, bytes(96)))
        with pytest.raises(Unavailable, match="this relay gave it up"):
            await next_event(events)


async def test_what_only_the_engine_here_refuses_is_passed_on(
    relay: Relay, applier: UpdateApplier, engine: FakeEngine
) -> None:
    """Each replica judges for itself; a child that was not sent it asks the trainer."""
    engine.answers = [BoundReport(0, 0, (), "ValueError: out of memory")]
    update = events_of(content(1))
    async with aclosing(relay.subscribe(request())) as sent:
        await anext(sent)
        await applier.apply(update[0])
        assert await next_event(sent) == update[0]
        async with aclosing(relay.subscribe(request(adapters=("default",)))) as late:
            await anext(late)
            await apply_all(applier, update[1:])
            assert [await next_event(sent) for _ in range(4)] == update[1:]
            await silent(sent)
            with pytest.raises(Unavailable, match="this relay refused an update"):
                await next_event(late)


async def test_a_relay_that_closes_ends_its_childrens_streams(relay: Relay) -> None:
    async with aclosing(relay.subscribe(request())) as events:
        await anext(events)
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        relay.close()
        with pytest.raises(StopAsyncIteration):
            await waiting
