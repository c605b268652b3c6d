"""The replica's servicers: between the messages of refit.v1 and this package's objects."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from refit.v1 import rollout_pb2, rollout_pb2_grpc, version_pb2, version_pb2_grpc

from common.grpc_server import Context
from common.version import API_VERSION, git_revision, service_version
from common.wire import ref_to_proto
from rollout_svc.engine import Engine
from rollout_svc.generation.batch import Batch
from rollout_svc.generation.generator import Generator
from rollout_svc.life.hold import GenerationHold
from rollout_svc.life.sleep import Sleep
from rollout_svc.versions.registry import AdapterRegistry

_LONGEST_WAIT_SECONDS = 300.0
_CAPABILITIES = (
    "lora",
    "merged",
    "base",
    "processed_logprobs",
    "version_rules",
    "swap_rules",
    "merge_rules",
    "pause_lease",
    "batch",
    "prefix",
    "prompt_logprobs",
    "structured_outputs",
)


@dataclass(slots=True)
class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Generation and its control."""

    generator: Generator
    registry: AdapterRegistry
    hold: GenerationHold
    sleep: Sleep

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[rollout_pb2.GenerateResponse, None]:
        wait_seconds = _wait_seconds(context)
        async with aclosing(self.generator.answer(request, wait_seconds=wait_seconds)) as answer:
            async for message in answer:
                yield message

    async def GenerateBatch(
        self, request: rollout_pb2.GenerateBatchRequest, context: Context
    ) -> AsyncGenerator[rollout_pb2.GenerateBatchResponse, None]:
        batch = Batch(partial(self.generator.answer, wait_seconds=_wait_seconds(context)))
        async with aclosing(batch.answers(request)) as answers:
            async for message in answers:
                yield message

    async def ListAdapters(
        self, request: rollout_pb2.RolloutServiceListAdaptersRequest, context: Context
    ) -> rollout_pb2.RolloutServiceListAdaptersResponse:
        return rollout_pb2.RolloutServiceListAdaptersResponse(
            adapters=[ref_to_proto(ref) for ref in self.registry.listing()]
        )

    async def PauseGeneration(
        self, request: rollout_pb2.PauseGenerationRequest, context: Context
    ) -> rollout_pb2.PauseGenerationResponse:
        await self.hold.pause(request.lease_seconds)
        return rollout_pb2.PauseGenerationResponse()

    async def ResumeGeneration(
        self, request: rollout_pb2.ResumeGenerationRequest, context: Context
    ) -> rollout_pb2.ResumeGenerationResponse:
        await self.hold.resume()
        return rollout_pb2.ResumeGenerationResponse()

    async def Sleep(
        self, request: rollout_pb2.SleepRequest, context: Context
    ) -> rollout_pb2.SleepResponse:
        await self.sleep.begin()
        return rollout_pb2.SleepResponse()

    async def WakeUp(
        self, request: rollout_pb2.WakeUpRequest, context: Context
    ) -> rollout_pb2.WakeUpResponse:
        await self.sleep.end()
        return rollout_pb2.WakeUpResponse()


@dataclass(slots=True)
class VersionServicer(version_pb2_grpc.VersionServiceServicer):
    """Who this replica is."""

    engine: Engine
    registry: AdapterRegistry

    async def GetVersion(
        self, request: version_pb2.GetVersionRequest, context: Context
    ) -> version_pb2.GetVersionResponse:
        return version_pb2.GetVersionResponse(
            service="rollout",
            service_version=service_version(),
            api_version=API_VERSION,
            git_revision=git_revision(),
            engine="vllm",
            engine_version=self.engine.version,
            capabilities=_CAPABILITIES,
            base_model=self.registry.weights.base.to_proto(),
            adapters=[ref_to_proto(ref) for ref in self.registry.listing()],
        )


def _wait_seconds(context: Context) -> float:
    remaining = context.time_remaining()
    return _LONGEST_WAIT_SECONDS if remaining is None else remaining
