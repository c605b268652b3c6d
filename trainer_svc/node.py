"""The trainer's gRPC face: publisher, fleet and servicers on one port, whatever trains behind."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from prometheus_client import REGISTRY

from common.grpc_server import GrpcServer, connect, start_server
from common.model_dir import BaseModel
from common.prometheus import metrics_served
from trainer_svc.base_weights import BaseWeights
from trainer_svc.config import ServerSettings
from trainer_svc.control import RunControl
from trainer_svc.fleet import Fleet
from trainer_svc.fleet.status import FleetCollector
from trainer_svc.metrics import UpdateMetrics
from trainer_svc.publisher import Publisher
from trainer_svc.service import (
    SERVICES,
    AdapterServicer,
    TrainerServicer,
    VersionServicer,
    register,
)

_GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Node:
    """What a run, or a publisher without one, needs of the service."""

    base: BaseModel
    control: RunControl
    publisher: Publisher
    fleet: Fleet
    server: GrpcServer
    metrics_port: int | None = None
    """The bound one."""

    async def ready(self) -> None:
        """Health says SERVING: there is a version to subscribe to."""
        for service in SERVICES:
            await self.server.set_serving(service, True)


@contextlib.asynccontextmanager
async def serve_node(
    settings: ServerSettings, *, base: BaseModel, control: RunControl, engine: str
) -> AsyncIterator[Node]:
    """Listen while the block runs; afterwards end the subscriptions, then the server.

    Raises:
        ConfigError: a port cannot be bound, or a file of `security` not be used.
    """
    publisher = Publisher(
        control.run_id,
        keep=settings.keep_versions,
        pace=settings.pace,
        delta=settings.delta,
        base=BaseWeights(base.path, base_fingerprint=base.fingerprint) if base.path else None,
    )
    fleet = Fleet(
        base,
        publisher,
        fan_out=settings.fan_out,
        open_channel=partial(connect, security=settings.security),
    )
    registry = control.gauges.registry
    registry.register(FleetCollector(fleet, publisher))
    metrics = UpdateMetrics(registry)
    # The second registry tells of the process.
    with metrics_served(
        *(registry, REGISTRY), host=settings.host, port=settings.metrics_port
    ) as metrics_port:
        server = await start_server(
            lambda grpc_server: register(
                grpc_server,
                adapters=AdapterServicer(publisher, fleet, metrics),
                trainer=TrainerServicer(control, fleet),
                version=VersionServicer(base, publisher, engine=engine),
            ),
            host=settings.host,
            port=settings.port,
            services=SERVICES,
            security=settings.security,
            plaintext_health_port=settings.health_port,
        )
        print(f"trainer listening on {server.address}", flush=True)
        try:
            yield Node(base, control, publisher, fleet, server, metrics_port)
        finally:
            await server.announce_shutdown()
            publisher.close()
            await server.stop(_GRACE_SECONDS)
            await fleet.close()
