"""Following a trainer that is a real gRPC server with a hand-written servicer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from refit.v1 import adapter_pb2, adapter_pb2_grpc, version_pb2

from common.grpc_server import start_server
from common.tasks import cancel
from common.wire import ref_to_proto
from rollout_svc.adapters import AdapterRegistry
from rollout_svc.metrics import Metrics
from rollout_svc.receiver import Limits
from rollout_svc.subscriber import BackOff, Subscriber
from rollout_svc.updates import UpdateApplier
from tests.adapters import make_adapter, make_ref
from tests.eventually import eventually
from tests.fake_trainer import Event, FakeTrainer, update_events

MANIFEST, BUFFER = make_adapter()
REF = make_ref(MANIFEST)
Follow = Callable[[FakeTrainer], AbstractAsyncContextManager[None]]


@pytest.fixture
def follow(registry: AdapterRegistry, limits: Limits, staging: Path) -> Follow:
    @asynccontextmanager
    async def followed(trainer: FakeTrainer) -> AsyncIterator[None]:
        def register(server: grpc.aio.Server) -> None:
            adapter_pb2_grpc.add_AdapterServiceServicer_to_server(trainer, server)

        server = await start_server(register, host="127.0.0.1", port=0, services=[])
        subscriber = Subscriber(
            server.address,
            subscription=lambda: adapter_pb2.AdapterUpdateRequest(
                replica_id="replica", held=[ref_to_proto(ref) for ref in registry.listing()]
            ),
        )
        applier = UpdateApplier(
            registry=registry,
            limits=limits,
            staging=staging,
            metrics=Metrics(),
            report=subscriber.report,
        )
        running = asyncio.create_task(subscriber.run(applier))
        yield
        await cancel(running)
        await server.stop(0)

    return followed


async def test_an_update_is_committed_and_reported(
    registry: AdapterRegistry, follow: Follow
) -> None:
    trainer = FakeTrainer(list(update_events(REF, MANIFEST, BUFFER)))
    async with follow(trainer):
        await eventually(lambda: trainer.reports)
    [report] = trainer.reports
    assert (report.replica_id, report.ref) == ("replica", ref_to_proto(REF))
    assert report.outcome == adapter_pb2.OUTCOME_COMMITTED
    assert registry.listing() == [REF]


async def test_a_lost_trainer_is_found_again_and_told_what_is_held(
    follow: Follow,
) -> None:
    """Fault 6: who comes back says what it holds, and is not sent it again."""
    trainer = FakeTrainer(list(update_events(REF, MANIFEST, BUFFER)), keep_open=False)
    async with follow(trainer):
        await eventually(lambda: len(trainer.subscriptions) >= 2)
    assert list(trainer.subscriptions[0].held) == []
    assert list(trainer.subscriptions[1].held) == [ref_to_proto(REF)]


async def test_silence_for_three_heartbeats_ends_the_subscription(
    follow: Follow,
) -> None:
    """Fault 23: a trainer that is gone without a word is noticed."""
    heartbeat = Event(heartbeat=adapter_pb2.Heartbeat(interval_seconds=0.02))
    trainer = FakeTrainer([heartbeat])
    async with follow(trainer):
        await eventually(lambda: len(trainer.subscriptions) >= 2)


@pytest.mark.parametrize("interval_seconds", [0.0, -1.0, float("nan")])
async def test_a_heartbeat_without_an_interval_is_ignored(
    registry: AdapterRegistry, follow: Follow, interval_seconds: float
) -> None:
    heartbeat = Event(heartbeat=adapter_pb2.Heartbeat(interval_seconds=interval_seconds))
    trainer = FakeTrainer([heartbeat, *update_events(REF, MANIFEST, BUFFER)])
    async with follow(trainer):
        await eventually(lambda: registry.listing() == [REF])
        await asyncio.sleep(0.05)
    assert len(trainer.subscriptions) == 1


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
    """Fault 22: what a faulty trainer sends is refused; the served version goes on."""
    retire = Event(retire=adapter_pb2.AdapterRetire(ref=ref))
    trainer = FakeTrainer([*update_events(REF, MANIFEST, BUFFER), retire])
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
    monkeypatch.setattr("rollout_svc.subscriber._REFUSED_DELAY_SECONDS", 0.01)
    trainer = FakeTrainer([], refusal="base model: differs; max_rank: 8 is too small")
    with caplog.at_level(logging.ERROR, logger="rollout_svc.subscriber"):
        async with follow(trainer):
            await eventually(lambda: len(trainer.subscriptions) >= 3)
    assert [record.message.partition(": ")[2] for record in caplog.records] == [trainer.refusal]


def test_back_off_grows_to_a_ceiling_and_starts_again() -> None:
    back_off = BackOff()
    ceilings = [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert all(0 <= back_off.next_seconds() <= ceiling for ceiling in ceilings)
    back_off.reset()
    assert back_off.next_seconds() <= 0.25
