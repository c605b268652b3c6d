"""Which weights made which tokens: vLLM's weight versions, read while a request streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from vllm.outputs import CompletionOutput
from vllm.v1.engine.output_processor import OutputProcessor

from rollout_svc.engine import TokenDelta

_FIRST = "default"
"""vLLM's own label, until the weights are marked."""


@dataclass(slots=True)
class WeightMarks:
    """Splits the deltas of one request where the engine's weights changed.

    vLLM tells the versions of a completion with its last output. Of one that is still running they
    are in the output processor, which notes them before it hands an output on.
    """

    processor: OutputProcessor
    request_id: str
    begun_with: int
    _given: Counter[int] = field(default_factory=Counter)
    """Tokens of each completion that were seen before."""

    def split(
        self, delta: TokenDelta, completion: CompletionOutput, *, now: int
    ) -> Iterator[TokenDelta]:
        """The delta in parts, each with its mark.

        Args:
            now: the mark of the engine's weights at present.
        """
        begin = self._given[delta.index]
        self._given[delta.index] = end = begin + len(delta.token_ids)
        if now == self.begun_with:
            yield replace(delta, mark=now) if now else delta
            return
        marks = self._marks(completion)
        cuts = sorted({begin, end, *(at for at, _ in marks if begin < at < end)})
        parts = list(pairwise(cuts)) or [(begin, end)]
        for first, last in parts:
            mark = next((m for at, m in reversed(marks) if at <= first), self.begun_with)
            if len(parts) == 1:
                yield replace(delta, mark=mark)
            else:
                yield _part(delta, first - begin, last - begin, mark)

    def _marks(self, completion: CompletionOutput) -> list[tuple[int, int]]:
        """The first token of each span, and the span's mark."""
        if completion.weight_versions is not None:
            return [(s.start, _number(s.version)) for s in completion.weight_versions]
        for internal_id in self.processor.external_req_ids.get(self.request_id, ()):
            state = self.processor.request_states.get(internal_id)
            if state is not None and state.request_index == completion.index:
                return [(at, _number(label)) for label, at in state.weight_version_starts]
        return []


def _number(label: str) -> int:
    return 0 if label == _FIRST else int(label)


def _part(delta: TokenDelta, begin: int, end: int, mark: int) -> TokenDelta:
    """Text comes with the last part: where it lies between tokens is not known."""
    is_first, is_last = begin == 0, end == len(delta.token_ids)
    return TokenDelta(
        index=delta.index,
        token_ids=delta.token_ids[begin:end],
        logprobs=delta.logprobs[begin:end],
        text=delta.text if is_last else "",
        finish_reason=delta.finish_reason if is_last else None,
        mark=mark,
        top=delta.top[begin:end],
        prompt=delta.prompt if is_first else None,
    )
