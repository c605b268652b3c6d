"""The life of a request: admitted, answered, and remembered under its id."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field

from refit.v1 import rollout_pb2

from common.tasks import ahead
from rollout_svc.engine import Engine, Generation
from rollout_svc.generation.answers import Answers
from rollout_svc.generation.prefix import prefix_token_ids
from rollout_svc.generation.prompts import prompt_token_ids
from rollout_svc.generation.requests import RunningRequests
from rollout_svc.generation.responses import Responses
from rollout_svc.generation.sampling import Sampling
from rollout_svc.generation.sampling_message import sampling_from_proto
from rollout_svc.generation.transcript import Part, Transcript
from rollout_svc.generation.unknown_fields import refuse_unknown_fields
from rollout_svc.metrics import AnswerTimes, Metrics
from rollout_svc.versions.live import Admitted
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.versions.selector import Selector, selector_from_proto


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read; `id` is its own, or one that it was given."""

    request: rollout_pb2.GenerateRequest
    id: str
    sampling: Sampling
    selector: Selector


@dataclass(slots=True)
class Generator:
    """Answers requests.

    async with aclosing(generator.answer(request, wait_seconds=30)) as messages:
        async for message in messages: ...
    """

    engine: Engine
    registry: AdapterRegistry
    requests: RunningRequests
    metrics: Metrics
    answers: Answers = field(default_factory=Answers)

    async def answer(
        self, request: rollout_pb2.GenerateRequest, *, wait_seconds: float
    ) -> AsyncGenerator[rollout_pb2.GenerateResponse, None]:
        """Stream the answer; closing the generator ends the request in the engine.

        Args:
            wait_seconds: how long it may take until the request is admitted.

        Raises:
            RefitError: it is refused, each for its reason, or the engine died.
        """
        if known := self.answers.recall(request):
            for message in known:
                yield message
            return
        # Nothing is awaited up to here: of two equal requests at once the second finds the first.
        times = AnswerTimes(self.metrics)
        sampling, selector = self._read(request)
        transcript, responses = Transcript(sampling.n), Responses(())
        asked = Asked(request, request.request_id or uuid.uuid4().hex, sampling, selector)
        with self.requests.running(asked.id), self.metrics.requests_running.track_inprogress():
            # A client that does not read keeps no version from being replaced.
            async with aclosing(ahead(self._made(asked, responses, wait_seconds))) as parts:
                async for delta, ref in parts:
                    times.add(delta)
                    if request.request_id or request.final_only:
                        transcript.add(delta, ref)
                    if request.request_id and delta.finish_reason and transcript.is_whole:
                        # Its receiver may be gone when the last message leaves, and come again.
                        self.answers.remember(request, _whole(transcript, responses))
                    for part in _sent_now(request, transcript, (delta, ref)):
                        yield responses.message(part)

    def _read(self, request: rollout_pb2.GenerateRequest) -> tuple[Sampling, Selector]:
        refuse_unknown_fields(request)
        vocab_size = self.engine.capabilities.vocab_size
        sampling = sampling_from_proto(request.sampling, n=request.n, vocab_size=vocab_size)
        return sampling, selector_from_proto(request.adapter)

    async def _made(
        self, asked: Asked, responses: Responses, wait_seconds: float
    ) -> AsyncGenerator[Part, None]:
        """What the engine makes, each part with its maker; the version is held until its end."""
        while True:
            async with self._admitted(asked, wait_seconds) as (generation, admitted):
                responses.prompt_token_ids = generation.prompt_token_ids
                async with aclosing(self.engine.generate(generation)) as deltas:
                    async for made in deltas:
                        if not admitted.goes_on():
                            break
                        responses.scores = responses.scores or made.prompt
                        yield await admitted.attribute(made)
                    else:
                        return

    @asynccontextmanager
    async def _admitted(
        self, asked: Asked, wait_seconds: float
    ) -> AsyncIterator[tuple[Generation, Admitted]]:
        """The request as the engine takes it, its adapter held inside the block."""
        request = asked.request
        async with AsyncExitStack() as held:
            async with self.requests.admission():
                prompt = await prompt_token_ids(request, self.engine)
                prefix = prefix_token_ids(
                    request,
                    asked.sampling,
                    prompt_tokens=len(prompt),
                    capabilities=self.engine.capabilities,
                )
                admission = self.registry.admit(
                    asked.selector, request_id=asked.id, wait_seconds=wait_seconds
                )
                admitted = await held.enter_async_context(admission)
            yield (
                Generation(
                    request_id=asked.id,
                    prompt_token_ids=prompt,
                    sampling=asked.sampling,
                    adapter=admitted.adapter,
                    cache_salt=admitted.cache_salt,
                    prefix_token_ids=prefix,
                    final_only=request.final_only,
                ),
                admitted,
            )


def _whole(transcript: Transcript, responses: Responses) -> list[rollout_pb2.GenerateResponse]:
    again = Responses(responses.prompt_token_ids, responses.scores)
    return [again.message(part) for part in transcript.joined()]


def _sent_now(
    request: rollout_pb2.GenerateRequest, transcript: Transcript, newest: Part
) -> Iterable[Part]:
    delta, _ = newest
    if request.final_only:
        return transcript.completion(delta.index) if delta.finish_reason else ()
    # What a version made that was refused after all is cut off, be it the whole delta.
    return (newest,) if delta.token_ids or delta.text or delta.finish_reason else ()
