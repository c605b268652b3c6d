"""Following a trainer that is a real gRPC server with a hand-written servicer."""

from __future__ import annotations

import logging

import pytest
from refit.v1 import adapter_pb2, version_pb2

from common.adapter import AdapterRef
from common.grpc_server import connect
from common.stream.frames import Event
from common.stream.sender import Receiver
from common.wire import ref_to_proto
from rollout_svc.updates.subscriber import BackOff, Subscriber
from rollout_svc.versions.registry import AdapterRegistry
from tests.eventually import eventually
from tests.fake_trainer import FakeTrainer, raw_chunk, sent_events
from tests.following import BUFFER, HEARTBEAT, REF, UPDATE, WHOLE, Follow


async def test_an_update_is_committed_and_reported(
    registry: AdapterRegistry, follow: Follow
) -> None:
    trainer = FakeTrainer(UPDATE)
    async with follow(trainer):
        await eventually(lambda: trainer.reports)
    [report] = trainer.reports
    assert (report.replica_id, report.ref) == ("replica", ref_to_proto(REF))
    assert report.outcome == adapter_pb2.OUTCOME_COMMITTED
    assert registry.listing() == [REF]


async def test_a_lost_trainer_is_found_again_and_told_what_is_held(follow: Follow) -> None:
    """faults.md 6, miles#1724: who comes back says what it holds, and is not sent it again."""
    trainer = FakeTrainer(UPDATE, keep_open=False)
    async with follow(trainer):
        await eventually(lambda: len(trainer.subscriptions) >= 2)
    assert list(trainer.subscriptions[0].held) == []
    assert list(trainer.subscriptions[1].held) == [ref_to_proto(REF)]


async def test_an_update_whose_stream_broke_is_gone_on_with(
    registry: AdapterRegistry, follow: Follow
) -> None:
    """faults.md 23, TRL#6797: not from its beginning."""
    rest = await sent_events(WHOLE, Receiver(start_bytes=100))
    trainer = FakeTrainer(UPDATE[:3], later=[rest], keep_open=False)
    async with follow(trainer):
        await eventually(lambda: registry.listing() == [REF])
    assert not trainer.subscriptions[0].HasField("partial")
    assert trainer.subscriptions[1].partial == adapter_pb2.PartialUpdate(
        ref=ref_to_proto(REF), received_bytes=100
    )


async def test_a_damaged_chunk_is_reported_and_asked_for_again(
    registry: AdapterRegistry, follow: Follow
) -> None:
    damaged = raw_chunk(50, bytes(BUFFER[50:100]))
    damaged.chunk.crc32c ^= 1
    rest = await sent_events(WHOLE, Receiver(start_bytes=50))
    trainer = FakeTrainer([*UPDATE[:2], damaged], later=[rest])
    async with follow(trainer):
        await eventually(lambda: len(trainer.reports) == 2)
    refused, committed = trainer.reports
    assert (refused.outcome, refused.stage) == (
        adapter_pb2.OUTCOME_REFUSED,
        adapter_pb2.UPDATE_STAGE_WIRE,
    )
    assert committed.outcome == adapter_pb2.OUTCOME_COMMITTED
    assert trainer.subscriptions[1].partial.received_bytes == 50
    assert registry.listing() == [REF]


async def test_what_is_not_held_is_told_by_subscribing_again(
    registry: AdapterRegistry, follow: Follow
) -> None:
    wrong = Event(
        alias=adapter_pb2.AdapterAlias(ref=ref_to_proto(AdapterRef("run", "old", 1, b"x" * 32)))
    )
    trainer = FakeTrainer([*UPDATE, wrong], later=[[]])
    async with follow(trainer):
        await eventually(lambda: len(trainer.subscriptions) == 2)
    assert list(trainer.subscriptions[1].held) == [ref_to_proto(REF)]
    assert len(trainer.reports) == 1
    assert registry.listing() == [REF]


async def test_what_fails_again_and_again_is_asked_for_less_and_less_often(
    follow: Follow,
) -> None:
    """A manifest that can be read is no progress, if what follows never is."""
    bad = raw_chunk(0, bytes(50))
    bad.chunk.crc32c ^= 1
    trainer = FakeTrainer([UPDATE[0], bad])
    async with follow(trainer) as subscriber:
        await eventually(lambda: len(trainer.subscriptions) >= 3)
        assert subscriber._back_off._ceiling >= 0.25 * 2**2


async def test_silence_for_three_heartbeats_ends_the_subscription(follow: Follow) -> None:
    """faults.md 23, TRL#6797: a trainer that is gone without a word is noticed."""
    trainer = FakeTrainer([HEARTBEAT])
    async with follow(trainer):
        await eventually(lambda: len(trainer.subscriptions) >= 2)
        await eventually(lambda: trainer.streams <= 1)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e300])
async def test_a_heartbeat_that_makes_no_sense_is_ignored(
    registry: AdapterRegistry, follow: Follow, seconds: float
) -> None:
    nonsense = adapter_pb2.Heartbeat(interval_seconds=seconds, lease_seconds=seconds)
    lease = adapter_pb2.Heartbeat(lease_seconds=0.06)
    trainer = FakeTrainer([Event(heartbeat=nonsense), *UPDATE, Event(heartbeat=lease)])
    async with follow(trainer):
        await eventually(lambda: registry.listing() == [REF])
        await eventually(lambda: trainer.renewals)
    assert len(trainer.subscriptions) == 1


async def test_the_lease_is_renewed_while_the_subscription_is_open(follow: Follow) -> None:
    beat = adapter_pb2.Heartbeat(interval_seconds=5, lease_seconds=0.06)
    trainer = FakeTrainer([Event(heartbeat=beat)])
    async with follow(trainer) as subscriber:
        await eventually(lambda: len(trainer.renewals) >= 3)
        await subscriber.drain("SIGTERM")
    assert adapter_pb2.RenewLeaseRequest(replica_id="replica") in trainer.renewals
    assert (
        trainer.renewals[-1]
        == adapter_pb2.RenewLeaseRequest(replica_id="replica", draining=True, reason="SIGTERM")
        or trainer.renewals[-2].draining
    )


async def test_a_goodbye_to_a_trainer_that_is_gone_is_no_error(follow: Follow) -> None:
    async with follow(FakeTrainer([])) as subscriber:
        pass
    await Subscriber("127.0.0.1:1", subscriber.subscription, connect).drain("SIGTERM")


@pytest.mark.parametrize(
    ("ref", "text"),
    [
        (version_pb2.AdapterRef(), "ref: run_id and adapter are both needed; one is empty"),
        (
            version_pb2.AdapterRef(run_id="run", adapter="default", version=1, digest=b"short"),
            "ref.digest: 5 bytes; a digest has 32",
        ),
    ],
)
async def test_a_malformed_retire_ends_the_subscription_and_not_the_replica(
    registry: AdapterRegistry,
    follow: Follow,
    caplog: pytest.LogCaptureFixture,
    ref: version_pb2.AdapterRef,
    text: str,
) -> None:
    """faults.md 22, AReaL#1160: what a faulty trainer sends is refused; what is served goes on."""
    retire = Event(retire=adapter_pb2.AdapterRetire(ref=ref))
    trainer = FakeTrainer([*UPDATE, retire])
    async with follow(trainer):
        await eventually(lambda: len(trainer.subscriptions) >= 2)
    assert registry.listing() == [REF]
    messages = [item.message for item in caplog.records if item.levelno == logging.WARNING]
    assert messages[0].partition(" ")[2].partition(": ")[2] == text


async def test_a_refusal_is_logged_once_with_the_trainers_reasons(
    follow: Follow,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout_svc.updates.subscriber._REFUSED_DELAY_SECONDS", 0.01)
    trainer = FakeTrainer([], refusal="base model: differs; max_rank: 8 is too small")
    with caplog.at_level(logging.ERROR, logger="rollout_svc.updates.subscriber"):
        async with follow(trainer):
            await eventually(lambda: len(trainer.subscriptions) >= 3)
    assert [record.message.partition(": ")[2] for record in caplog.records] == [trainer.refusal]


async def test_a_draining_replica_says_so_on_every_new_stream(follow: Follow) -> None:
    """A trainer whose stream broke has forgotten it, and would send prompts again."""
    beat = Event(heartbeat=adapter_pb2.Heartbeat(interval_seconds=5, lease_seconds=60))
    trainer = FakeTrainer([beat, *UPDATE], later=[[beat]])
    async with follow(trainer) as subscriber:
        # What came after the heartbeat was applied, so that the first lease is being renewed.
        await eventually(lambda: trainer.reports)
        await subscriber.drain("SIGTERM")
        assert len(trainer.renewals) == 1
        trainer.end_streams()
        await eventually(lambda: len(trainer.renewals) == 2)
    draining = adapter_pb2.RenewLeaseRequest(replica_id="replica", draining=True, reason="SIGTERM")
    assert trainer.renewals == [draining, draining]
    assert len(trainer.subscriptions) == 2


def test_back_off_grows_to_a_ceiling_and_starts_again() -> None:
    back_off = BackOff()
    ceilings = [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert all(0 <= back_off.next_seconds() <= ceiling for ceiling in ceilings)
    back_off.reset()
    assert back_off.next_seconds() <= 0.25
