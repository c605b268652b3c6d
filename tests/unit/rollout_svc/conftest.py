"""A registry over a hand-written engine, what feeds it, and the servicers before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from refit.v1 import adapter_pb2, rollout_pb2_grpc, version_pb2_grpc

from common.adapter import Dtype, ExpertLayout, Kind
from common.grpc_server import GrpcServer, connect, start_server
from common.stream.sender import Pace
from common.tasks import cancel
from common.wire import ref_to_proto
from rollout_svc.generation.generator import Generator
from rollout_svc.generation.requests import RunningRequests
from rollout_svc.life.hold import GenerationHold
from rollout_svc.life.pauses import EnginePause
from rollout_svc.life.readiness import Readiness
from rollout_svc.life.sleep import Sleep
from rollout_svc.metrics import Metrics
from rollout_svc.service import RolloutServicer, VersionServicer
from rollout_svc.updates.applier import UpdateApplier
from rollout_svc.updates.limits import Limits, Takes
from rollout_svc.updates.relay import Relay
from rollout_svc.updates.subscriber import Subscriber
from rollout_svc.versions.registry import AdapterRegistry
from tests.adapters import LORA
from tests.fake_engine import FakeEngine
from tests.fake_trainer import FakeTrainer, serving
from tests.following import Follow
from tests.live import BASE, PRISTINE, Commits
from tests.receiving import Opener, Reports


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def registry(engine: FakeEngine, pause: EnginePause) -> AsyncIterator[AdapterRegistry]:
    registry = AdapterRegistry(
        engine=engine,
        base=BASE,
        pristine=PRISTINE,
        slots=3,
        keep_versions=2,
        slot_wait_seconds=0.2,
        pause=pause,
    )
    unloading = asyncio.create_task(registry.run())
    yield registry
    await cancel(unloading)


@pytest.fixture
def limits() -> Limits:
    return Limits(
        kinds=frozenset(Kind),
        dtypes=frozenset(Dtype),
        max_bytes=1 << 20,
        slots=Takes(
            target_modules=frozenset(LORA.target_modules),
            layouts=frozenset(ExpertLayout.PER_EXPERT.factors),
            max_rank=8,
        ),
    )


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    path = tmp_path / "staging"
    path.mkdir()
    return path


@pytest.fixture
def commit(registry: AdapterRegistry, tmp_path: Path) -> Commits:
    return Commits(registry, tmp_path)


@pytest.fixture
def relay(registry: AdapterRegistry) -> Relay:
    return Relay(
        registry=registry,
        max_children=2,
        pace=Pace(chunk_bytes=64, heartbeat_seconds=0.05),
    )


@pytest.fixture
def reports(registry: AdapterRegistry) -> Reports:
    return Reports(registry)


@pytest.fixture
def applier(
    registry: AdapterRegistry, relay: Relay, limits: Limits, staging: Path, reports: Reports
) -> UpdateApplier:
    return UpdateApplier(
        source="trainer",
        registry=registry,
        relay=relay,
        limits=limits,
        staging=staging,
        metrics=Metrics(),
        report=reports,
    )


@pytest.fixture
def opened(staging: Path, limits: Limits) -> Opener:
    return Opener(staging / "update", limits)


@pytest.fixture
def pause(engine: FakeEngine) -> EnginePause:
    return EnginePause(engine)


@pytest.fixture
def readiness() -> Readiness:
    return Readiness(Metrics(), {})


@pytest.fixture
def sleep(
    registry: AdapterRegistry, engine: FakeEngine, pause: EnginePause, readiness: Readiness
) -> Sleep:
    return Sleep(
        engine=engine,
        registry=registry,
        pause=pause,
        readiness=readiness,
        enabled=True,
        grace_seconds=0.1,
        woken=lambda: None,
    )


@pytest.fixture
async def servicer(
    registry: AdapterRegistry, engine: FakeEngine, pause: EnginePause, sleep: Sleep
) -> RolloutServicer:
    return RolloutServicer(
        generator=Generator(
            engine=engine,
            registry=registry,
            requests=RunningRequests(abort=engine.abort, max_requests=4),
            metrics=Metrics(),
        ),
        registry=registry,
        hold=GenerationHold(pause),
        sleep=sleep,
    )


@pytest.fixture
async def server(servicer: RolloutServicer) -> AsyncIterator[GrpcServer]:
    def register(server: grpc.aio.Server) -> None:
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server)
        version = VersionServicer(engine=servicer.generator.engine, registry=servicer.registry)
        version_pb2_grpc.add_VersionServiceServicer_to_server(version, server)

    server = await start_server(register, host="127.0.0.1", port=0, services=[])
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(server: GrpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(server.address) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> rollout_pb2_grpc.RolloutServiceStub:
    return rollout_pb2_grpc.RolloutServiceStub(channel)


@pytest.fixture
def follow(registry: AdapterRegistry, applier: UpdateApplier) -> Follow:
    @asynccontextmanager
    async def followed(trainer: FakeTrainer) -> AsyncIterator[Subscriber]:
        async with serving(trainer) as address:
            subscriber = Subscriber(
                address,
                subscription=lambda: adapter_pb2.AdapterUpdateRequest(
                    replica_id="replica", held=[ref_to_proto(ref) for ref in registry.listing()]
                ),
                open_channel=connect,
            )
            applier.outcomes.report = subscriber.report
            running = asyncio.create_task(subscriber.run(applier))
            yield subscriber
            await cancel(running)
            assert running.cancelled() or running.exception() is None

    return followed
