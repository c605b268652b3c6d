"""vLLM's engine client as its OpenAI server is given it: it generates what was admitted."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from vllm.exceptions import RetryableRequestError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from common.errors import RefitError
from rollout_svc.engine import TokenDelta
from rollout_svc.metrics import AnswerTimes, Metrics
from rollout_svc.openai_api.admission import Admission, current_admission
from rollout_svc.openai_api.structures import check_structure
from rollout_svc.vllm_engine.engine import VllmEngine, lora_request_of
from rollout_svc.vllm_engine.marks import WeightMarks
from rollout_svc.vllm_engine.params import NO_TOKEN_FITS, check_tokens_left

_DEAD = "the engine ended; send the request again, to another replica or later"


class AdmittedEngine:
    """The part of vLLM's `EngineClient` that its server calls; nothing here changes the engine."""

    is_running = True
    """Whether the server should live on; that is the replica's to decide."""

    def __init__(self, engine: VllmEngine, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._llm = engine.llm
        self.vllm_config, self.model_config = self._llm.vllm_config, self._llm.model_config
        self.renderer, self.input_processor = self._llm.renderer, self._llm.input_processor

    @property
    def errored(self) -> bool:
        return self._llm.errored

    @property
    def dead_error(self) -> BaseException:
        return RetryableRequestError(_DEAD)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        self._llm.check_admission(n, request_id)

    async def check_health(self) -> None:
        await self._llm.check_health()

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `AsyncLLM.generate`, under the version that this task's request was admitted to.

        Raises:
            VLLMValidationError: at once, so that a stream has not begun: the parameters leave no
                token, or a schema says what the text would not be kept to. Later: no token fits
                the structure.
            RetryableRequestError: the engine ended, or the version that took over was refused.
        """
        check_structure(sampling_params.structured_outputs)
        check_tokens_left(sampling_params, self._llm)
        return self._generated(prompt, sampling_params, options)

    async def _generated(
        self, prompt: Any, sampling_params: SamplingParams, options: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        admission = current_admission()
        assert admission is not None, "the door admits whatever generates"
        while True:
            admitted = admission.admitted
            watch = _Watch(admission, self._engine, self._metrics, sampling_params)
            stream = self._llm.generate(
                _salted(prompt, admitted.cache_salt),
                sampling_params,
                admission.request_id,
                lora_request=lora_request_of(admitted.adapter),
                **options,
            )
            with _retryable():
                async with aclosing(stream):
                    async for output in stream:
                        if not admitted.goes_on():
                            break
                        for completion in output.outputs:
                            await watch.see(completion)
                        yield output
                    else:
                        return
                await admission.again()


class _Watch:
    """Counts the tokens of one generation, and notes who made them."""

    def __init__(
        self, admission: Admission, engine: VllmEngine, metrics: Metrics, params: SamplingParams
    ) -> None:
        self._admission, self._engine, self._metrics = admission, engine, metrics
        processor = engine.llm.output_processor
        self._marks = WeightMarks(processor, admission.request_id, engine.mark)
        streams = params.output_kind is RequestOutputKind.DELTA
        self._is_bound = params.structured_outputs is not None
        # Of an answer that leaves whole no token has a time.
        self._times = AnswerTimes(metrics) if streams else None

    async def see(self, completion: CompletionOutput) -> None:
        """Count it.

        Raises:
            VLLMValidationError: no token fits what binds the text.
            RetryableRequestError: a version that was refused after all made some of it.
        """
        if completion.finish_reason == "error" and self._is_bound:
            raise VLLMValidationError(NO_TOKEN_FITS, parameter="structured_outputs")
        delta = TokenDelta(completion.index, tuple(completion.token_ids), (), "", None)
        if self._times:
            self._times.add(delta)
        else:
            self._metrics.tokens.inc(len(delta.token_ids))
        for part in self._marks.split(delta, completion, now=self._engine.mark):
            attributed, maker = await self._admission.admitted.attribute(part)
            if len(attributed.token_ids) < len(part.token_ids):
                raise RetryableRequestError(
                    "the version that went on with this request was refused; send it again"
                )
            self._admission.was_made_by(maker)


@contextmanager
def _retryable() -> Iterator[None]:
    try:
        yield
    except EngineDeadError as error:
        raise RetryableRequestError(_DEAD) from error
    except RefitError as error:
        raise RetryableRequestError(str(error)) from error


def _salted(prompt: Any, salt: str) -> Any:
    """A salt that the request brings divides the version's part of the prefix cache further."""
    own = prompt.get("cache_salt")
    return {**prompt, "cache_salt": f"{salt} {own}" if own else salt}
