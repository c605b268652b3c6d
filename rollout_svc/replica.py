"""A replica around a running engine: its servers, its tasks and its end."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import starmap
from pathlib import Path

import grpc
from refit.v1 import (
    adapter_pb2,
    rollout_pb2,
    rollout_pb2_grpc,
    version_pb2,
    version_pb2_grpc,
)

from common.adapter import Kind
from common.errors import RefitError
from common.grpc_server import GrpcServer, connect, start_server
from common.model_dir import BaseModel
from common.prometheus import metrics_served
from common.stream.frames import add_adapter_service
from common.tasks import gather_or_cancel
from common.wire import dtype_to_proto, kind_to_proto, layout_to_proto, ref_to_proto
from rollout_svc.adapters import AdapterRegistry
from rollout_svc.config import RolloutConfig
from rollout_svc.engine import Engine
from rollout_svc.hold import GenerationHold
from rollout_svc.limits import Limits
from rollout_svc.metrics import Metrics
from rollout_svc.relay import Relay, RelayServicer
from rollout_svc.requests import RunningRequests
from rollout_svc.service import RolloutServicer, VersionServicer
from rollout_svc.subscriber import Subscriber
from rollout_svc.updates import UpdateApplier
from rollout_svc.warm_up import warm_up

SERVICE = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
VERSION_SERVICE = version_pb2.DESCRIPTOR.services_by_name["VersionService"].full_name
ADAPTER_SERVICE = adapter_pb2.DESCRIPTOR.services_by_name["AdapterService"].full_name
_HEALTH_CHECK_SECONDS = 1.0


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
        self._hold = GenerationHold(engine)
        self._registry = AdapterRegistry(
            engine=engine,
            base=base,
            base_missing=config.starts_without_weights,
            slots=config.max_loras,
            keep_versions=config.keep_versions,
            slot_wait_seconds=config.slot_wait_seconds,
        )
        self._relay = Relay(registry=self._registry, max_children=config.max_children)

    async def serve(self, stopped: asyncio.Event) -> None:
        """Serve until `stopped`, then let running generations end within the grace.

        Raises:
            ConfigError: the address cannot be bound.
            EngineDead: the engine ended; everything else is stopped by then.
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
            with metrics_served(
                self._metrics.registry, host=self._config.host, port=self._config.metrics_port
            ):
                await self._run_tasks(server, stopped)
        except* RefitError as group:
            raise _first(group) from None
        finally:
            await server.announce_shutdown()
            self._hold.close()
            await server.stop(0)

    async def _run_tasks(self, server: GrpcServer, stopped: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            subscribers = self._subscribers(server)
            tasks = [
                group.create_task(job)
                for job in (
                    self._registry.run(),
                    self._watch_engine(),
                    self._become_ready(server),
                    *starmap(self._follow, enumerate(subscribers)),
                )
            ]
            await stopped.wait()
            await server.announce_shutdown()
            goodbyes = (subscriber.drain("SIGTERM") for subscriber in subscribers)
            await gather_or_cancel(goodbyes)
            self._relay.close()
            await self._requests.drain(self._config.grace_seconds)
            for task in tasks:
                task.cancel()

    def _register(self, server: grpc.aio.Server) -> None:
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(
            RolloutServicer(
                engine=self._engine,
                registry=self._registry,
                requests=self._requests,
                hold=self._hold,
                metrics=self._metrics,
            ),
            server,
        )
        version_pb2_grpc.add_VersionServiceServicer_to_server(
            VersionServicer(engine=self._engine, registry=self._registry), server
        )
        add_adapter_service(RelayServicer(self._relay), server)

    async def _become_ready(self, server: GrpcServer) -> None:
        await warm_up(self._engine)
        await server.set_serving(VERSION_SERVICE, True)
        if self._config.trainer_addresses:
            await self._registry.first_commit.wait()
        await server.set_serving(SERVICE, True)
        await server.set_serving(ADAPTER_SERVICE, self._config.max_children > 0)

    async def _watch_engine(self) -> None:
        """Raises `EngineDead`. vLLM tells of it by a flag that a thread sets, so it is polled."""
        while True:
            await asyncio.sleep(_HEALTH_CHECK_SECONDS)
            await self._engine.check_health()
            self._registry.weights.check_whole()

    def _subscribers(self, server: GrpcServer) -> list[Subscriber]:
        return [
            Subscriber(
                address,
                subscription=partial(self._subscription, server, address),
                open_channel=partial(connect, security=self._config.security),
            )
            for address in self._config.trainer_addresses
        ]

    async def _follow(self, number: int, subscriber: Subscriber) -> None:
        capabilities = self._engine.capabilities
        limits = Limits(
            kinds=frozenset(capabilities.kinds),
            layouts=frozenset(capabilities.layouts),
            max_rank=capabilities.max_rank,
            target_modules=frozenset(capabilities.target_modules),
            dtypes=frozenset(capabilities.dtypes),
            max_bytes=self._config.max_update_bytes,
        )
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
        # Once a merged version has taken the base's place, only another one can take that.
        kinds = (Kind.MERGED,) if weights.merged_from else capabilities.kinds
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
                kinds=map(kind_to_proto, kinds),
                layouts=map(layout_to_proto, capabilities.layouts),
                needs_base=weights.missing,
            ),
            held=[ref_to_proto(ref) for ref in self._registry.listing(source=trainer_address)],
        )


def _first(group: BaseExceptionGroup[RefitError]) -> RefitError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
