"""From vLLM's outputs to this service's deltas."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput

from common.errors import InvalidField, Unavailable
from rollout_svc.engine import FinishReason, Generation, PromptScores, TokenDelta, TopTokens
from rollout_svc.generation.continued_text import ContinuedText
from rollout_svc.generation.sampling import Sampling
from rollout_svc.vllm_engine.marks import WeightMarks
from rollout_svc.vllm_engine.params import NO_TOKEN_FITS

_FINISH_REASONS = {reason.value: reason for reason in FinishReason}
_ERROR = "error"


class VllmAnswer:
    """What comes of one request.

    Args:
        tokenizer: vLLM's; None where it has none.
        marks: says which weights made which tokens.
    """

    def __init__(self, generation: Generation, tokenizer: Any, marks: WeightMarks) -> None:
        self._sampling = generation.sampling
        self._marks = marks
        self._text: ContinuedText | None = None
        if tokenizer is not None and generation.prefix_token_ids:
            self._text = ContinuedText.of(generation, tokenizer)
        self._prompt_is_scored = False
        self.vllm_makes_text = tokenizer is not None and self._text is None
        self.ended = False
        """At a stop string, of which vLLM does not know."""

    def deltas(self, output: RequestOutput, *, now: int) -> Iterator[TokenDelta]:
        """The next tokens of each completion.

        Args:
            now: the mark of the engine's weights at present.

        Raises:
            InvalidField: the structure that was asked for does not compile, or no token fits it.
            Unavailable: vLLM gave a completion up.
        """
        scores = None if self._prompt_is_scored else _prompt_scores(output, self._sampling)
        self._prompt_is_scored |= scores is not None
        for completion in output.outputs:
            if completion.finish_reason == _ERROR:
                raise _given_up(self._sampling)
            delta = _token_delta(completion, self._sampling, scores)
            scores = None
            for part in self._marks.split(delta, completion, now=now):
                if self._text is None:
                    yield part
                elif not self.ended:
                    yield (read := self._text.read(part))
                    self.ended = read.finish_reason is not None


def _given_up(sampling: Sampling) -> InvalidField | Unavailable:
    if structure := sampling.structure:
        return InvalidField(f"sampling.{structure.kind.value}: {NO_TOKEN_FITS}")
    return Unavailable("engine: it failed to generate; see its log")


def _token_delta(
    completion: CompletionOutput, sampling: Sampling, scores: PromptScores | None
) -> TokenDelta:
    reason = completion.finish_reason
    if sampling.max_tokens == 0:
        return TokenDelta(completion.index, (), (), "", _finish_reason(reason), prompt=scores)
    rows: Any = completion.logprobs or FlatLogprobs()
    return TokenDelta(
        index=completion.index,
        token_ids=tuple(completion.token_ids),
        logprobs=tuple(rows.logprobs[start] for start in rows.start_indices),
        text=completion.text,
        finish_reason=_finish_reason(reason),
        top=_top(rows, sampling.top_logprobs),
        prompt=scores,
    )


def _prompt_scores(output: RequestOutput, sampling: Sampling) -> PromptScores | None:
    rows: Any = output.prompt_logprobs
    if not rows or len(rows) < len(output.prompt_token_ids or ()):
        return None
    # Nothing comes before the first token.
    rows = rows[1:]
    return PromptScores(
        logprobs=tuple(rows.logprobs[start] for start in rows.start_indices),
        top=_top(rows, sampling.prompt_logprobs or 0),
    )


def _top(rows: FlatLogprobs, count: int) -> tuple[TopTokens, ...]:
    """The `count` likeliest of each position; fewer where fewer can come at all.

    A position has the token that stands there and the likeliest; whether it is one of them twice
    depends on whether vLLM has joined outputs.
    """
    if not count:
        return ()
    return tuple(
        _likeliest(rows, start, end, count)
        for start, end in zip(rows.start_indices, rows.end_indices, strict=True)
    )


def _likeliest(rows: FlatLogprobs, start: int, end: int, count: int) -> TopTokens:
    ranks = dict(zip(rows.token_ids[start:end], rows.ranks[start:end], strict=True))
    logprobs = dict(zip(rows.token_ids[start:end], rows.logprobs[start:end], strict=True))
    by_rank = sorted(ranks, key=lambda token: ranks[token] or 0)[:count]
    return tuple((token, logprobs[token]) for token in by_rank if logprobs[token] > -math.inf)


def _finish_reason(word: str | None) -> FinishReason | None:
    """vLLM's "repetition" is none that it was asked to look for."""
    return None if word is None else _FINISH_REASONS.get(word, FinishReason.ABORT)
