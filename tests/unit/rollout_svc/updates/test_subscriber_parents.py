"""Following a trainer that sends the replica to a parent for its bytes."""

from __future__ import annotations

import pytest
from refit.v1 import adapter_pb2

from common.stream.frames import Event
from common.stream.sender import Receiver
from rollout_svc.updates import subscriber as subscriber_module
from rollout_svc.updates.applier import UpdateApplier
from rollout_svc.versions.registry import AdapterRegistry
from tests.eventually import eventually
from tests.fake_trainer import FakeTrainer, sent_events, serving
from tests.following import HEARTBEAT, REF, UPDATE, WHOLE, Follow


def parent_at(address: str, *, replica_id: str = "relay") -> Event:
    parent = adapter_pb2.AdapterParent(replica_id=replica_id, address=address, run_id="run")
    return Event(parent=parent)


async def test_bytes_come_from_the_parent_and_reports_go_to_the_trainer(
    registry: AdapterRegistry, follow: Follow
) -> None:
    relay = FakeTrainer(UPDATE)
    async with serving(relay) as address:
        trainer = FakeTrainer([parent_at(address)])
        async with follow(trainer):
            await eventually(lambda: trainer.reports)
            assert (trainer.streams, relay.streams) == (1, 1)
        await eventually(lambda: relay.streams == 0)
    assert relay.reports == []
    assert (relay.subscriptions[0].run_id, trainer.subscriptions[0].run_id) == ("run", "")
    assert registry.listing() == [REF]


@pytest.mark.parametrize("relay_events", [UPDATE[:3], [*UPDATE[:3], HEARTBEAT]])
async def test_a_lost_parents_child_goes_back_to_the_trainer_with_what_it_has(
    registry: AdapterRegistry, follow: Follow, relay_events: list[Event]
) -> None:
    """faults.md 23, TRL#6797: its stream ends, or it falls silent."""
    relay = FakeTrainer(relay_events, keep_open=relay_events[-1] is HEARTBEAT)
    async with serving(relay) as address:
        rest = await sent_events(WHOLE, Receiver(start_bytes=100))
        trainer = FakeTrainer([parent_at(address)], later=[rest])
        async with follow(trainer):
            await eventually(lambda: registry.listing() == [REF])
        await eventually(lambda: relay.streams == 0)
    assert list(trainer.subscriptions[1].lost_parents) == ["relay"]
    assert trainer.subscriptions[1].partial.received_bytes == 100


async def test_a_lost_parent_is_forgotten_after_a_minute(
    follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay that came back is used again."""
    assert subscriber_module._LOST_SECONDS == 60
    monkeypatch.setattr(subscriber_module, "_LOST_SECONDS", 0.0)
    trainer = FakeTrainer([parent_at("127.0.0.1:1")], later=[[]])
    async with follow(trainer):
        await eventually(lambda: len(trainer.subscriptions) == 2)
    assert list(trainer.subscriptions[1].lost_parents) == []


async def test_a_parent_that_cannot_be_reached_is_lost(follow: Follow) -> None:
    trainer = FakeTrainer([parent_at("127.0.0.1:1")], later=[[]])
    async with follow(trainer):
        await eventually(lambda: len(trainer.subscriptions) == 2)
    assert list(trainer.subscriptions[1].lost_parents) == ["relay"]


async def test_a_second_parent_is_taken_by_subscribing_again(follow: Follow) -> None:
    relay = FakeTrainer([])
    async with serving(relay) as address:
        trainer = FakeTrainer([parent_at(address), parent_at(address)], later=[[parent_at("")]])
        async with follow(trainer):
            await eventually(lambda: len(trainer.subscriptions) == 2)
            await eventually(lambda: (trainer.streams, relay.streams) == (1, 0))
    assert list(trainer.subscriptions[1].lost_parents) == []


async def test_cancelled_in_the_middle_it_leaves_no_stream_and_no_directory(
    follow: Follow, applier: UpdateApplier
) -> None:
    relay = FakeTrainer(UPDATE[:3])
    async with serving(relay) as address:
        trainer = FakeTrainer([parent_at(address)])
        async with follow(trainer):
            await eventually(lambda: applier._update and applier._update.received_bytes == 100)
            assert len(list(applier.staging.iterdir())) == 1
        await eventually(lambda: relay.streams == 0)
    assert list(applier.staging.iterdir()) == []
    assert trainer.streams == 0
