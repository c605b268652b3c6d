"""The replica's servicers: between the messages of refit.v1 and this package's objects."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field

from refit.v1 import rollout_pb2, rollout_pb2_grpc, version_pb2, version_pb2_grpc

from common.grpc_server import Context
from common.version import API_VERSION, git_revision, service_version
from common.wire import ref_to_proto
from rollout_svc.adapters import AdapterRegistry
from rollout_svc.answers import Answers, Transcript
from rollout_svc.engine import Engine, FinishReason, Generation, TokenDelta
from rollout_svc.hold import GenerationHold
from rollout_svc.metrics import Metrics
from rollout_svc.prompts import prompt_token_ids
from rollout_svc.requests import RunningRequests
from rollout_svc.sampling import sampling_from_proto
from rollout_svc.selector import selector_from_proto

_LONGEST_WAIT_SECONDS = 300.0
_BASE_SALT = "base"
_CAPABILITIES = ("lora", "merged", "base", "processed_logprobs", "version_rules", "pause_lease")
_FINISH_REASONS = {
    FinishReason.STOP: rollout_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: rollout_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: rollout_pb2.FINISH_REASON_ABORT,
}


@dataclass(slots=True)
class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Generation and its control."""

    engine: Engine
    registry: AdapterRegistry
    requests: RunningRequests
    hold: GenerationHold
    metrics: Metrics
    answers: Answers = field(default_factory=Answers)

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[rollout_pb2.GenerateResponse, None]:
        if answer := self.answers.recall(request):
            for message in answer:
                yield message
            return
        # Nothing is awaited up to here: of two equal requests at once the second finds the first.
        async with self._admitted(request, context) as (generation, adapter):
            prompt = generation.prompt_token_ids
            transcript = Transcript(generation.sampling.n) if request.request_id else None
            async with aclosing(self.engine.generate(generation)) as deltas:
                async for delta in deltas:
                    self.metrics.tokens.inc(len(delta.token_ids))
                    if transcript and transcript.add(delta):
                        whole = _responses(transcript, adapter, generation.prompt_token_ids)
                        self.answers.remember(request, whole)
                    yield _response(delta, adapter, prompt)
                    prompt = ()

    @asynccontextmanager
    async def _admitted(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[tuple[Generation, version_pb2.AdapterRef | None]]:
        """The request as the engine takes it, its id and its adapter held inside the block."""
        sampling = sampling_from_proto(request.sampling, n=request.n)
        selector = selector_from_proto(request.adapter)
        request_id = request.request_id or uuid.uuid4().hex
        async with AsyncExitStack() as held:
            held.enter_context(self.requests.running(request_id))
            held.enter_context(self.metrics.requests_running.track_inprogress())
            async with self.requests.admission():
                prompt = await prompt_token_ids(request, self.engine)
                admitted = self.registry.admit(selector, wait_seconds=_wait_seconds(context))
                live = await held.enter_async_context(admitted)
            yield (
                Generation(
                    request_id=request_id,
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    adapter=live.lora if live else None,
                    cache_salt=live.ref.digest.hex() if live else _BASE_SALT,
                ),
                ref_to_proto(live.ref) if live else None,
            )

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


def _responses(
    transcript: Transcript, adapter: version_pb2.AdapterRef | None, prompt: tuple[int, ...]
) -> list[rollout_pb2.GenerateResponse]:
    """One message a completion, the prompt in the first."""
    first, *others = transcript.joined()
    return [_response(first, adapter, prompt), *(_response(part, adapter, ()) for part in others)]


def _response(
    delta: TokenDelta, adapter: version_pb2.AdapterRef | None, prompt: tuple[int, ...]
) -> rollout_pb2.GenerateResponse:
    response = rollout_pb2.GenerateResponse(
        index=delta.index,
        token_ids=delta.token_ids,
        logprobs=delta.logprobs,
        text=delta.text,
        adapter=adapter,
    )
    if prompt:
        response.prompt_token_ids.extend(prompt)
    if delta.finish_reason:
        response.finish_reason = _FINISH_REASONS[delta.finish_reason]
    return response
