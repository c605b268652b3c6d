"""The text of an answer that goes on from a prefix."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from common.errors import InvalidField
from rollout_svc.engine import FinishReason, Generation, TokenDelta
from rollout_svc.generation.sampling import Sampling


@dataclass(slots=True)
class ContinuedText:
    """Gives text, and ends at stop strings, as if the answer had never been interrupted.

    vLLM itself would take the prefix for prompt: it would not find a stop string that begins in it.
    So its detokenizer is used here, and has read the prefix before the first new token.

        text = ContinuedText.of(generation, tokenizer)
        delta = text.read(delta)

    What the prefix held of a stop string's beginning stays where it was sent.
    """

    _detokenizer: IncrementalDetokenizer

    @classmethod
    def of(cls, generation: Generation, tokenizer: Any) -> ContinuedText:
        """Raises `InvalidField`: the prefix holds a whole stop string."""
        request = EngineCoreRequest(
            request_id=generation.request_id,
            prompt_token_ids=list(generation.prompt_token_ids),
            mm_features=None,
            sampling_params=_text_params(generation.sampling),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
        if stop := detokenizer.update(list(generation.prefix_token_ids), stop_terminated=False):
            raise InvalidField(
                f"prefix_token_ids: they hold the stop string {stop!r}, where the answer has ended"
            )
        detokenizer.get_next_output_text(finished=True, delta=True)
        return cls(detokenizer)

    def read(self, delta: TokenDelta) -> TokenDelta:
        """The delta with its text, and without tokens behind a stop string."""
        before = self._detokenizer.num_output_tokens()
        ends_in_stop_token = delta.finish_reason is FinishReason.STOP
        stop = self._detokenizer.update(list(delta.token_ids), ends_in_stop_token)
        kept = self._detokenizer.num_output_tokens() - before
        reason = FinishReason.STOP if stop else delta.finish_reason
        return replace(
            delta,
            token_ids=delta.token_ids[:kept],
            logprobs=delta.logprobs[:kept],
            top=delta.top[:kept],
            text=self._detokenizer.get_next_output_text(reason is not None, delta=True),
            finish_reason=reason,
        )


def _text_params(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        stop=list(sampling.stop),
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens is not False,
    )
