"""vLLM's AsyncLLM behind the `Engine` seam."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import vllm
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.utils.system_utils import kill_process_tree
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from common.adapter import Dtype, Kind
from common.errors import InvalidField, RefitError, Unavailable
from rollout_svc.chat import chat_token_ids
from rollout_svc.config import RolloutConfig
from rollout_svc.engine import (
    BoundReport,
    Capabilities,
    EngineAdapter,
    EngineDead,
    FinishReason,
    Generation,
    Message,
    TokenDelta,
)
from rollout_svc.engine_args import engine_config
from rollout_svc.sampling import Sampling
from rollout_svc.vllm_environment import set_cpu_defaults

_RPC_SECONDS = 60.0
_RELOAD_SECONDS = 600.0
# Prompt log-probabilities are of the raw distribution whatever the parameters; greedy, as vLLM
# generates one token at least and this one shall draw no random number. vLLM itself reads no cached
# prefix for them.
_SCORE_PARAMS = SamplingParams(
    max_tokens=1,
    temperature=0.0,
    prompt_logprobs=0,
    detokenize=False,
    output_kind=RequestOutputKind.FINAL_ONLY,
)
_FINISH_REASONS = {reason.value: reason for reason in FinishReason}
_DEAD_MESSAGE = "the vLLM engine process ended; restart this replica"


class VllmEngine:
    """One engine with its worker processes.

    engine = await VllmEngine.start(config)
    await engine.load(EngineAdapter(1, "default@1", path))
    """

    def __init__(self, llm: AsyncLLM, capabilities: Capabilities) -> None:
        self._llm = llm
        self._capabilities = capabilities

    @classmethod
    async def start(cls, config: RolloutConfig) -> VllmEngine:
        """Start the workers and load the model; takes seconds to minutes.

        Raises:
            ConfigError: vLLM knows no such engine argument, or refuses a value.
        """
        if current_platform.is_cpu():
            set_cpu_defaults()
        llm = _start_llm(config)
        try:
            modules = (await _rpc(llm.collective_rpc("refit_prepare", args=(os.getpid(),))))[0]
        except BaseException:
            llm.shutdown()
            raise
        return cls(llm, _capabilities(config, llm, modules))

    @property
    def version(self) -> str:
        return vllm.__version__

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def encode_text(self, text: str) -> list[int]:
        return list(self._tokenizer("text").encode(text))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return chat_token_ids(self._tokenizer("chat"), messages)

    def _tokenizer(self, field: str) -> Any:
        if self._llm.tokenizer is None:
            raise InvalidField(f"{field}: this replica runs without a tokenizer; send token_ids")
        return self._llm.tokenizer

    async def load(self, adapter: EngineAdapter) -> list[BoundReport]:
        return await self._report("refit_load", adapter.id, adapter.name, str(adapter.path))

    async def check_weights(self, path: Path) -> list[BoundReport]:
        return await self._report("refit_check_weights", str(path))

    async def load_weights(self, path: Path | None) -> list[BoundReport]:
        return await self._report(
            "refit_load_weights", str(path or ""), within_seconds=_RELOAD_SECONDS
        )

    async def _report(
        self, method: str, *args: object, within_seconds: float = _RPC_SECONDS
    ) -> list[BoundReport]:
        """What the ranks answer to a method of the worker extension."""
        call = self._llm.collective_rpc(method, args=args)
        answers = await _rpc(call, within_seconds=within_seconds)
        return [
            BoundReport(
                stage=answer["stage"],
                bound_modules=answer["bound_modules"],
                unbound=tuple(answer["unbound"]),
                error=answer["error"],
            )
            for answer in answers
        ]

    async def unload(self, adapter_id: int) -> None:
        await _rpc(self._llm.remove_lora(adapter_id))

    async def pause(self) -> None:
        await _rpc(self._llm.pause_generation(mode="keep", clear_cache=False))

    async def resume(self) -> None:
        await _rpc(self._llm.resume_generation())

    async def generate(self, generation: Generation) -> AsyncGenerator[TokenDelta, None]:
        params = _vllm_params(generation.sampling, detokenize=self._llm.tokenizer is not None)
        stream = self._llm.generate(
            tokens_input(list(generation.prompt_token_ids), cache_salt=generation.cache_salt),
            params,
            generation.request_id,
            lora_request=_lora_request(generation.adapter),
        )
        async with _translated(), aclosing(stream):
            async for output in stream:
                for completion in output.outputs:
                    yield _delta(completion)

    async def abort(self, request_id: str) -> None:
        await _rpc(self._llm.abort(request_id))

    async def score(self, adapter: EngineAdapter | None, token_ids: tuple[int, ...]) -> list[float]:
        request_id = f"score-{uuid.uuid4().hex}"
        stream = self._llm.generate(
            tokens_input(list(token_ids), cache_salt=request_id),
            _SCORE_PARAMS,
            request_id,
            lora_request=_lora_request(adapter),
        )
        async with _translated(), aclosing(stream):
            async for output in stream:
                rows: Any = output.prompt_logprobs
        return [row[token].logprob for token, row in zip(token_ids[1:], rows[1:], strict=True)]

    async def check_health(self) -> None:
        """Raises `EngineDead` once the engine process or a worker is gone."""
        async with _translated():
            await self._llm.check_health()

    def shutdown(self) -> None:
        """End the engine's processes; blocks until they are gone."""
        self._llm.shutdown()
        # Its finalizer would otherwise run with the interpreter half gone, and fail aloud.
        del self._llm


def _start_llm(config: RolloutConfig) -> AsyncLLM:
    """Leaves no process behind when it fails, or a signal's handler raises in it."""
    arguments = engine_config(config)
    others = multiprocessing.active_children()
    try:
        return AsyncLLM.from_vllm_config(arguments, disable_log_stats=True)
    except BaseException:
        # Those that vLLM had not yet put down as its own when it was interrupted.
        for child in multiprocessing.active_children():
            if child in others:
                continue
            if child.pid is not None:
                kill_process_tree(child.pid)
            child.join()
        raise


@asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    """vLLM's errors as this service's."""
    try:
        yield
    except EngineDeadError as error:
        raise EngineDead(_DEAD_MESSAGE) from error
    except VLLMClientError as error:
        raise InvalidField(f"request: {error}") from error
    except EngineGenerateError as error:
        raise Unavailable("engine: it failed to generate; see its log") from error


async def _rpc(call: Any, *, within_seconds: float = _RPC_SECONDS) -> Any:
    """What a worker raises arrives as a plain `Exception`; the engine goes on after it."""
    try:
        async with _translated(), asyncio.timeout(within_seconds):
            return await call
    except TimeoutError as error:
        raise Unavailable(f"engine: no answer in {within_seconds:.0f} s; retry later") from error
    except RefitError:
        raise
    except Exception as error:
        raise Unavailable(f"engine: {error}; retry later") from error


def _capabilities(config: RolloutConfig, llm: AsyncLLM, modules: Sequence[str]) -> Capabilities:
    return Capabilities(
        max_rank=config.max_lora_rank,
        target_modules=tuple(modules),
        dtypes=tuple(Dtype),
        max_loras=config.max_loras,
        max_model_len=llm.model_config.max_model_len,
        vocab_size=llm.model_config.get_vocab_size(),
        # Quantized weights are not those that a trainer has.
        kinds=(Kind.LORA,) if llm.model_config.quantization else tuple(Kind),
    )


def _lora_request(adapter: EngineAdapter | None) -> LoRARequest | None:
    if adapter is None:
        return None
    return LoRARequest(adapter.name, adapter.id, str(adapter.path))


def _vllm_params(sampling: Sampling, *, detokenize: bool) -> SamplingParams:
    if sampling.stop and not detokenize:
        raise InvalidField("sampling.stop: this replica runs without a tokenizer; leave it out")
    given = {
        name: value
        for name in ("temperature", "top_p", "top_k", "min_p", "seed")
        if (value := getattr(sampling, name)) is not None
    }
    return SamplingParams(
        n=sampling.n,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=0,
        detokenize=detokenize,
        output_kind=RequestOutputKind.DELTA,
        **given,
    )


def _delta(completion: CompletionOutput) -> TokenDelta:
    tokens = tuple(completion.token_ids)
    rows: Any = completion.logprobs or []
    return TokenDelta(
        index=completion.index,
        token_ids=tokens,
        logprobs=tuple(row[token].logprob for token, row in zip(tokens, rows, strict=True)),
        text=completion.text,
        finish_reason=_finish_reason(completion.finish_reason),
    )


def _finish_reason(word: str | None) -> FinishReason | None:
    """vLLM's other words, "error" and "repetition", are for completions that it gave up."""
    if word is None:
        return None
    return _FINISH_REASONS.get(word, FinishReason.ABORT)
