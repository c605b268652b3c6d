"""The messages that an answer is sent as."""

from __future__ import annotations

from dataclasses import dataclass

from refit.v1 import rollout_pb2, version_pb2

from common.adapter import AdapterRef
from common.wire import ref_to_proto
from rollout_svc.engine import FinishReason, PromptScores, TopTokens
from rollout_svc.generation.transcript import Part

_FINISH_REASONS = {
    FinishReason.STOP: rollout_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: rollout_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: rollout_pb2.FINISH_REASON_ABORT,
}


@dataclass(slots=True)
class Responses:
    """Of one stream; the first message has the prompt, as the model saw it, and its scores."""

    prompt_token_ids: tuple[int, ...]
    scores: PromptScores | None = None
    _first: bool = True
    _ref: AdapterRef | None = None
    _adapter: version_pb2.AdapterRef | None = None

    def message(self, part: Part) -> rollout_pb2.GenerateResponse:
        delta, ref = part
        if ref is not self._ref:
            self._ref, self._adapter = ref, ref_to_proto(ref) if ref else None
        message = rollout_pb2.GenerateResponse(
            index=delta.index,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
            text=delta.text,
            adapter=self._adapter,
        )
        if delta.top:
            message.top_logprobs.extend(map(_top_to_proto, delta.top))
        if delta.finish_reason:
            message.finish_reason = _FINISH_REASONS[delta.finish_reason]
        if self._first:
            self._add_prompt(message)
            self._first = False
        return message

    def _add_prompt(self, message: rollout_pb2.GenerateResponse) -> None:
        message.prompt_token_ids.extend(self.prompt_token_ids)
        if self.scores:
            message.prompt_logprobs.extend(self.scores.logprobs)
            message.prompt_top_logprobs.extend(map(_top_to_proto, self.scores.top))


def _top_to_proto(top: TopTokens) -> rollout_pb2.TopLogprobs:
    return rollout_pb2.TopLogprobs(
        token_ids=[token for token, _ in top], logprobs=[logprob for _, logprob in top]
    )
