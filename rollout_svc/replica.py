"""A replica around a running engine: its servers, its tasks and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from itertools import starmap
from pathlib import Path

import grpc
from prometheus_client import REGISTRY
from refit.v1 import (
    adapter_pb2,
    rollout_pb2,
    rollout_pb2_grpc,
    version_pb2,
    version_pb2_grpc,
)

from common.errors import RefitError
from common.grpc_server import GrpcServer, connect, start_server
from common.model_dir import BaseModel
from common.prometheus import metrics_served
from common.rules import Rules, Swap, merge_to_proto, swap_to_proto
from common.stream.frames import add_adapter_service
from common.tasks import gather_or_cancel
from common.wire import dtype_to_proto, kind_to_proto, layout_to_proto, ref_to_proto
from rollout_svc.config import RolloutConfig
from rollout_svc.engine import Engine, Merging
from rollout_svc.generation.generator import Generator
from rollout_svc.generation.requests import RunningRequests
from rollout_svc.life.hold import GenerationHold
from rollout_svc.life.pauses import EnginePause
from rollout_svc.life.readiness import Condition, Readiness
from rollout_svc.life.sleep import Sleep
from rollout_svc.life.supervision import EngineSupervisor
from rollout_svc.live_metrics import LiveMetrics
from rollout_svc.metrics import Metrics
from rollout_svc.openai_api.server import openai_served
from rollout_svc.service import RolloutServicer, VersionServicer
from rollout_svc.updates.applier import UpdateApplier
from rollout_svc.updates.limits import Limits
from rollout_svc.updates.relay import Relay, RelayServicer
from rollout_svc.updates.subscriber import Subscriber
from rollout_svc.versions.pristine import PristineBase
from rollout_svc.versions.registry import AdapterRegistry

SERVICE = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
VERSION_SERVICE = version_pb2.DESCRIPTOR.services_by_name["VersionService"].full_name
ADAPTER_SERVICE = adapter_pb2.DESCRIPTOR.services_by_name["AdapterService"].full_name


class Replica:
    """Everything of a replica but its engine, which must have been started before."""

    def __init__(
        self,
        config: RolloutConfig,
        engine: Engine,
        *,
        base: BaseModel,
        replica_id: str,
        staging: Path,
    ) -> None:
        self._config, self._engine = config, engine
        self._replica_id, self._staging = replica_id, staging
        self._metrics = Metrics()
        self._requests = RunningRequests(abort=engine.abort, max_requests=config.max_requests)
        self._pause = EnginePause(engine)
        self._hold = GenerationHold(self._pause)
        self._registry = AdapterRegistry(
            engine=engine,
            base=base,
            pristine=PristineBase(
                None if config.starts_without_weights else config.model,
                staging / "base" if config.base_copy == "host" else None,
            ),
            slots=config.max_loras,
            keep_versions=config.keep_versions,
            slot_wait_seconds=config.slot_wait_seconds,
            rules=Rules(config.swap, config.merge),
            pause=self._pause,
        )
        self._relay = Relay(registry=self._registry, max_children=config.max_children)
        self._readiness = Readiness(self._metrics, _needs(relays=config.max_children > 0))
        self._subscribers: list[Subscriber] = []
        self._sleep = Sleep(
            engine=engine,
            registry=self._registry,
            pause=self._pause,
            readiness=self._readiness,
            enabled=bool(config.engine.get("enable_sleep_mode")),
            grace_seconds=config.grace_seconds,
            woken=self._resubscribe,
        )

    async def serve(self, stopped: asyncio.Event) -> None:
        """Serve until `stopped`, then let running generations end within the grace.

        Raises:
            ConfigError: the address cannot be bound.
            EngineDead: the engine ended once more than it may be restarted; everything else is
                stopped by then.
        """
        server = await start_server(
            self._register,
            host=self._config.host,
            port=self._config.port,
            services=[SERVICE, VERSION_SERVICE, ADAPTER_SERVICE],
            security=self._config.security,
            plaintext_health_port=self._config.health_port,
        )
        print(f"rollout listening on {server.address}", flush=True)
        try:
            with self._metrics_served():
                async with self._openai_served():
                    await self._readiness.show_at(server)
                    await self._run_tasks(server, stopped)
        except* RefitError as group:
            raise _first(group) from None
        finally:
            await server.announce_shutdown()
            self._hold.close()
            await server.stop(0)

    def _metrics_served(self) -> AbstractContextManager[int | None]:
        own = self._metrics.registry
        own.register(LiveMetrics(self._registry, self._requests, self._metrics))
        # vLLM puts its own into the other one.
        return metrics_served(own, REGISTRY, host=self._config.host, port=self._config.metrics_port)

    @asynccontextmanager
    async def _openai_served(self) -> AsyncIterator[None]:
        endpoint = openai_served(
            self._config,
            self._engine,
            registry=self._registry,
            requests=self._requests,
            metrics=self._metrics,
        )
        async with endpoint as url:
            if url:
                print(f"openai listening on {url}", flush=True)
            yield

    async def _run_tasks(self, server: GrpcServer, stopped: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            self._subscribers = self._make_subscribers(server)
            tasks = [
                group.create_task(job)
                for job in (
                    self._registry.run(),
                    self._supervisor().run(),
                    self._become_ready(),
                    *starmap(self._follow, enumerate(self._subscribers)),
                )
            ]
            await stopped.wait()
            await server.announce_shutdown()
            goodbyes = (subscriber.drain("SIGTERM") for subscriber in self._subscribers)
            await gather_or_cancel(goodbyes)
            self._relay.close()
            await self._requests.drain(self._config.grace_seconds)
            for task in tasks:
                task.cancel()

    def _register(self, server: grpc.aio.Server) -> None:
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(
            RolloutServicer(
                generator=Generator(
                    engine=self._engine,
                    registry=self._registry,
                    requests=self._requests,
                    metrics=self._metrics,
                ),
                registry=self._registry,
                hold=self._hold,
                sleep=self._sleep,
            ),
            server,
        )
        version_pb2_grpc.add_VersionServiceServicer_to_server(
            VersionServicer(engine=self._engine, registry=self._registry), server
        )
        add_adapter_service(RelayServicer(self._relay), server)

    async def _become_ready(self) -> None:
        if self._config.trainer_addresses:
            await self._registry.first_commit.wait()
        await self._readiness.gain(Condition.ADAPTER)

    def _supervisor(self) -> EngineSupervisor:
        return EngineSupervisor(
            engine=self._engine,
            registry=self._registry,
            pause=self._pause,
            readiness=self._readiness,
            metrics=self._metrics,
            max_restarts=self._config.engine_restarts,
            restarted=self._resubscribe,
        )

    def _resubscribe(self) -> None:
        for subscriber in self._subscribers:
            subscriber.resubscribe()

    def _make_subscribers(self, server: GrpcServer) -> list[Subscriber]:
        return [
            Subscriber(
                address,
                subscription=partial(self._subscription, server, address),
                open_channel=partial(connect, security=self._config.security),
            )
            for address in self._config.trainer_addresses
        ]

    async def _follow(self, number: int, subscriber: Subscriber) -> None:
        limits = Limits.of(self._engine.capabilities, max_bytes=self._config.max_update_bytes)
        await subscriber.run(
            UpdateApplier(
                source=subscriber.address,
                registry=self._registry,
                relay=self._relay,
                limits=limits,
                staging=self._staging / str(number),
                metrics=self._metrics,
                report=subscriber.report,
            )
        )

    def _subscription(
        self, server: GrpcServer, trainer_address: str
    ) -> adapter_pb2.AdapterUpdateRequest:
        capabilities, weights = self._engine.capabilities, self._registry.weights
        return adapter_pb2.AdapterUpdateRequest(
            replica_id=self._replica_id,
            advertised_address=self._config.advertised_address or server.address,
            base_model=weights.base.to_proto(),
            capabilities=adapter_pb2.ReplicaCapabilities(
                max_rank=capabilities.max_rank,
                target_modules=capabilities.target_modules,
                dtypes=[dtype_to_proto(dtype) for dtype in capabilities.dtypes],
                max_loras=capabilities.max_loras,
                encodings=[adapter_pb2.ENCODING_HELD, adapter_pb2.ENCODING_DELTA_ZSTD],
                relay=self._config.max_children > 0,
                kinds=map(kind_to_proto, capabilities.kinds),
                layouts=map(layout_to_proto, capabilities.layouts),
                needs_base=weights.missing,
                merging=_merging_to_proto(capabilities.merging),
                merge=merge_to_proto(self._config.merge),
                swap_rules=map(swap_to_proto, Swap),
            ),
            held=[ref_to_proto(ref) for ref in self._registry.listing(source=trainer_address)],
        )


def _needs(*, relays: bool) -> dict[str, frozenset[Condition]]:
    """What each service needs to be ready; one that is not named never is."""
    needs = {SERVICE: frozenset(Condition), VERSION_SERVICE: frozenset({Condition.ENGINE})}
    # What it passes on needs no engine.
    return {**needs, ADAPTER_SERVICE: frozenset({Condition.ADAPTER})} if relays else needs


def _merging_to_proto(merging: Merging | None) -> adapter_pb2.MergeCapabilities | None:
    if merging is None:
        return None
    return adapter_pb2.MergeCapabilities(
        target_modules=merging.target_modules, layouts=map(layout_to_proto, merging.layouts)
    )


def _first(group: BaseExceptionGroup[RefitError]) -> RefitError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
