"""vLLM's AsyncLLM behind the `Engine` seam."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import vllm
from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from common.adapter import Dtype, ExpertLayout, Kind, Layout
from common.errors import Incompatible, InvalidField
from rollout_svc.config import RolloutConfig
from rollout_svc.engine import (
    BoundReport,
    Capabilities,
    EngineAdapter,
    Generation,
    Merging,
    Message,
    Mismatch,
    MismatchReason,
    TokenDelta,
)
from rollout_svc.generation.chat import chat_token_ids
from rollout_svc.vllm_engine.answers import VllmAnswer
from rollout_svc.vllm_engine.calls import CALL_SECONDS, ask, translated
from rollout_svc.vllm_engine.marks import WeightMarks
from rollout_svc.vllm_engine.params import (
    check_tokenizer,
    check_tokens_left,
    refusals_named,
    vllm_params,
)
from rollout_svc.vllm_engine.start import RunningLlm, start_llm

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


class VllmEngine:
    """One engine with its worker processes.

    engine = await VllmEngine.start(config)
    await engine.load(EngineAdapter(1, "default@1", path))
    """

    def __init__(
        self, running: RunningLlm, capabilities: Capabilities, *, config: RolloutConfig
    ) -> None:
        self._running = running
        self._capabilities = capabilities
        self._config = config
        self._mark = 0

    @classmethod
    async def start(cls, config: RolloutConfig) -> VllmEngine:
        """Start the workers and load the model; takes seconds to minutes, and blocks no other task.

        Raises:
            ConfigError: vLLM knows no such engine argument, or refuses a value.
            EngineDead: it did not start.
        """
        running, capabilities = await _started(config)
        return cls(running, capabilities, config=config)

    async def restart(self) -> None:
        await asyncio.to_thread(self._running.end)
        self._running, _ = await _started(self._config)
        self._mark = 0

    @property
    def version(self) -> str:
        return vllm.__version__

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def llm(self) -> AsyncLLM:
        """vLLM's own client; another one after a restart."""
        return self._running.llm

    @property
    def mark(self) -> int:
        """What `mark_weights` set last."""
        return self._mark

    def encode_text(self, text: str) -> list[int]:
        return list(self._tokenizer("text").encode(text))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return chat_token_ids(self._tokenizer("chat"), messages)

    def _tokenizer(self, field: str) -> Any:
        if self.llm.tokenizer is None:
            raise InvalidField(f"{field}: this replica runs without a tokenizer; send token_ids")
        return self.llm.tokenizer

    async def load(self, adapter: EngineAdapter, *, in_place: bool = False) -> list[BoundReport]:
        return await self._report(
            "refit_load", adapter.id, adapter.name, str(adapter.path), in_place
        )

    async def check_weights(self, path: Path) -> list[BoundReport]:
        return await self._report("refit_check_weights", str(path))

    async def load_weights(self, path: Path) -> list[BoundReport]:
        return await self._report("refit_load_weights", str(path), within_seconds=_RELOAD_SECONDS)

    async def check_merge(self, path: Path, *, base: Path) -> list[BoundReport]:
        return await self._report("refit_check_merge", str(path), str(base))

    async def merge(self, path: Path | None, *, base: Path) -> list[BoundReport]:
        return await self._report(
            "refit_merge", str(path or ""), str(base), within_seconds=_RELOAD_SECONDS
        )

    async def mark_weights(self, mark: int) -> None:
        await ask(self.llm, self.llm.update_weight_version(str(mark)))
        self._mark = mark

    async def _report(
        self, method: str, *args: object, within_seconds: float = CALL_SECONDS
    ) -> list[BoundReport]:
        """What the ranks answer to a method of the worker extension."""
        call = self.llm.collective_rpc(method, args=args)
        answers = await ask(self.llm, call, within_seconds=within_seconds)
        return [
            BoundReport(
                stage=answer["stage"],
                bound_modules=answer["bound_modules"],
                mismatches=tuple(
                    Mismatch(tensor, MismatchReason[reason], detail)
                    for tensor, reason, detail in answer["mismatches"]
                ),
                error=answer["error"],
                digest=answer["digest"],
            )
            for answer in answers
        ]

    async def unload(self, adapter_id: int) -> None:
        await ask(self.llm, self.llm.remove_lora(adapter_id))

    async def pause(self) -> None:
        await ask(self.llm, self.llm.pause_generation(mode="keep", clear_cache=False))

    async def resume(self) -> None:
        await ask(self.llm, self.llm.resume_generation())

    async def sleep(self) -> None:
        if not self._config.engine.get("enable_sleep_mode"):
            raise Incompatible(
                "engine.enable_sleep_mode: not set, so this engine cannot sleep; start the replica "
                "with it, on an accelerator"
            )
        await ask(self.llm, self.llm.sleep(level=1), within_seconds=_RELOAD_SECONDS)

    async def wake_up(self) -> None:
        await ask(self.llm, self.llm.wake_up(), within_seconds=_RELOAD_SECONDS)

    async def generate(self, generation: Generation) -> AsyncGenerator[TokenDelta, None]:
        llm, sampling = self.llm, generation.sampling
        if llm.tokenizer is None:
            check_tokenizer(sampling)
        marks = WeightMarks(llm.output_processor, generation.request_id, self._mark)
        answer = VllmAnswer(generation, llm.tokenizer, marks)
        sequence = [*generation.prompt_token_ids, *generation.prefix_token_ids]
        async with translated():
            with refusals_named(sampling):
                params = vllm_params(generation, detokenize=answer.vllm_makes_text)
                check_tokens_left(params, llm)
                stream = llm.generate(
                    tokens_input(sequence, cache_salt=generation.cache_salt),
                    params,
                    generation.request_id,
                    lora_request=lora_request_of(generation.adapter),
                )
                async with aclosing(stream):
                    async for output in stream:
                        for delta in answer.deltas(output, now=self._mark):
                            yield delta
                        if answer.ended:
                            return

    async def abort(self, request_id: str) -> None:
        await ask(self.llm, self.llm.abort(request_id))

    async def score(self, adapter: EngineAdapter | None, token_ids: tuple[int, ...]) -> list[float]:
        request_id = f"score-{uuid.uuid4().hex}"
        stream = self.llm.generate(
            tokens_input(list(token_ids), cache_salt=request_id),
            _SCORE_PARAMS,
            request_id,
            lora_request=lora_request_of(adapter),
        )
        async with translated(), aclosing(stream):
            async for output in stream:
                rows: Any = output.prompt_logprobs
        return [row[token].logprob for token, row in zip(token_ids[1:], rows[1:], strict=True)]

    async def check_health(self) -> None:
        """Raises `EngineDead` once the engine process or a worker is gone."""
        async with translated():
            try:
                if not self._running.is_whole:
                    raise EngineDeadError
                await self.llm.check_health()
            except EngineDeadError as error:
                # Those that came as it died have not been told.
                self.llm.output_processor.propagate_error(error)
                raise

    def shutdown(self) -> None:
        """End the engine's processes; blocks until they are gone."""
        self._running.end()
        # Its finalizer would otherwise run with the interpreter half gone, and fail aloud.
        del self._running


async def _started(config: RolloutConfig) -> tuple[RunningLlm, Capabilities]:
    running = await start_llm(config)
    llm = running.llm
    try:
        modules = (await ask(llm, llm.collective_rpc("refit_prepare", args=(os.getpid(),))))[0]
        mergeable = (await ask(llm, llm.collective_rpc("refit_merge_targets")))[0]
    except BaseException:
        await asyncio.to_thread(running.end)
        raise
    return running, _capabilities(config, llm, modules, mergeable)


def _capabilities(
    config: RolloutConfig, llm: AsyncLLM, modules: Sequence[str], mergeable: Sequence[str]
) -> Capabilities:
    # Quantized weights are not those that a trainer has.
    quantized = llm.model_config.quantization is not None
    merging = Merging(tuple(mergeable), (*ExpertLayout.PER_EXPERT.factors, Layout.MAGNITUDE))
    return Capabilities(
        max_rank=config.max_lora_rank,
        target_modules=tuple(modules),
        dtypes=tuple(Dtype),
        max_loras=config.max_loras,
        max_model_len=llm.model_config.max_model_len,
        vocab_size=llm.model_config.get_vocab_size(),
        kinds=(Kind.LORA,) if quantized else tuple(Kind),
        merging=None if quantized else merging,
    )


def lora_request_of(adapter: EngineAdapter | None) -> LoRARequest | None:
    """None where the engine's own weights answer."""
    if adapter is None:
        return None
    return LoRARequest(adapter.name, adapter.id, str(adapter.path))
