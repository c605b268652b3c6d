"""The trainer's servicers: messages in, objects called, messages out."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import grpc
from refit.v1 import (
    adapter_pb2,
    adapter_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    version_pb2,
    version_pb2_grpc,
)

from common.grpc_server import Context
from common.model_dir import BaseModel
from common.stream.frames import Message, add_adapter_service
from common.version import API_VERSION, git_revision, package_version, service_version
from common.wire import ref_to_proto
from trainer_svc.control import RunControl
from trainer_svc.fleet import Fleet
from trainer_svc.fleet.status import fleet_status
from trainer_svc.metrics import UpdateMetrics
from trainer_svc.publisher import Publisher

ADAPTER_SERVICE = "refit.v1.AdapterService"
TRAINER_SERVICE = "refit.v1.TrainerService"
VERSION_SERVICE = "refit.v1.VersionService"
CAPABILITIES = (
    *("adapter_kind:lora", "adapter_kind:merged", "adapter_kind:base"),
    *("crc32c", "alias", "held", "delta_zstd", "resume", "relay"),
)
SERVICES = (ADAPTER_SERVICE, TRAINER_SERVICE, VERSION_SERVICE)


class AdapterServicer(adapter_pb2_grpc.AdapterServiceServicer):
    """Distribution of adapter versions."""

    def __init__(self, publisher: Publisher, fleet: Fleet, metrics: UpdateMetrics) -> None:
        self._publisher = publisher
        self._fleet = fleet
        self._metrics = metrics

    async def AdapterUpdate(
        self, request: adapter_pb2.AdapterUpdateRequest, context: Context
    ) -> AsyncGenerator[Message]:
        with self._fleet.members.joined(request) as replica:
            events = self._publisher.subscribe(replica.subscription)
            async with contextlib.aclosing(events):
                async for event in events:
                    yield event
                    self._metrics.sent(event)

    async def ReportAdapter(
        self, request: adapter_pb2.ReportAdapterRequest, context: Context
    ) -> adapter_pb2.ReportAdapterResponse:
        self._fleet.report(request)
        self._metrics.reported(request)
        return adapter_pb2.ReportAdapterResponse()

    async def RenewLease(
        self, request: adapter_pb2.RenewLeaseRequest, context: Context
    ) -> adapter_pb2.RenewLeaseResponse:
        return adapter_pb2.RenewLeaseResponse(lease_seconds=self._fleet.members.renew(request))

    async def ListAdapters(
        self, request: adapter_pb2.AdapterServiceListAdaptersRequest, context: Context
    ) -> adapter_pb2.AdapterServiceListAdaptersResponse:
        refs = map(ref_to_proto, self._publisher.refs())
        return adapter_pb2.AdapterServiceListAdaptersResponse(adapters=refs)


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """The run, seen and steered from outside."""

    def __init__(self, control: RunControl, fleet: Fleet) -> None:
        self._control = control
        self._fleet = fleet

    async def GetStatus(
        self, request: trainer_pb2.GetStatusRequest, context: Context
    ) -> trainer_pb2.GetStatusResponse:
        control = self._control
        return trainer_pb2.GetStatusResponse(
            run_id=control.run_id,
            state=control.state,
            step=control.step,
            steps_total=control.steps_total,
            replicas=fleet_status(self._fleet),
            metrics=control.metrics,
            message=control.message,
        )

    async def SaveCheckpoint(
        self, request: trainer_pb2.SaveCheckpointRequest, context: Context
    ) -> trainer_pb2.SaveCheckpointResponse:
        path, step = await self._control.checkpoint()
        return trainer_pb2.SaveCheckpointResponse(path=str(path), step=step)

    async def StopRun(
        self, request: trainer_pb2.StopRunRequest, context: Context
    ) -> trainer_pb2.StopRunResponse:
        self._control.stop()
        return trainer_pb2.StopRunResponse()


class VersionServicer(version_pb2_grpc.VersionServiceServicer):
    """Who is answering."""

    def __init__(self, base: BaseModel, publisher: Publisher, *, engine: str) -> None:
        self._base = base
        self._publisher = publisher
        self._engine = engine

    async def GetVersion(
        self, request: version_pb2.GetVersionRequest, context: Context
    ) -> version_pb2.GetVersionResponse:
        return version_pb2.GetVersionResponse(
            service="trainer",
            service_version=service_version(),
            api_version=API_VERSION,
            git_revision=git_revision(),
            engine=self._engine,
            engine_version=package_version(self._engine) if self._engine else "",
            capabilities=CAPABILITIES,
            base_model=self._base.to_proto(),
            adapters=map(ref_to_proto, self._publisher.refs()),
        )


def register(
    server: grpc.aio.Server,
    *,
    adapters: AdapterServicer,
    trainer: TrainerServicer,
    version: VersionServicer,
) -> None:
    add_adapter_service(adapters, server)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(trainer, server)
    version_pb2_grpc.add_VersionServiceServicer_to_server(version, server)
