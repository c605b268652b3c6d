"""A replica whose tokens count from 0 in every completion, and which cuts completions off."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence

from refit.v1 import rollout_pb2, rollout_pb2_grpc

from common.adapter import AdapterRef
from common.errors import RefitError
from common.grpc_server import Context
from common.wire import ref_to_proto
from tests.group_replica import ABORT, OLD, REF, STOP
from trainer_svc.rl.completion import Completion

LENGTH = rollout_pb2.FINISH_REASON_LENGTH


class CountingReplica(rollout_pb2_grpc.RolloutServiceServicer):
    """Token k is k, of text "a" to "z" and log-probability -version - k / 8.

    Args:
        cuts: lengths at which a completion is cut off; each makes the next version answer.
        refs: the versions, the last of them for all that comes after the last cut.
        whole: completions of a group that end by themselves at its first cut.
        errors: what a request ends with after its first token, by its number.
        on_cut: called before the first message that cuts off.
    """

    def __init__(
        self,
        *cuts: int,
        refs: Sequence[AdapterRef] = (OLD, REF),
        whole: Collection[int] = (),
        errors: Mapping[int, RefitError] | None = None,
        on_cut: Callable[[], None] = lambda: None,
    ) -> None:
        self.requests: list[rollout_pb2.GenerateRequest] = []
        self._cuts, self._refs, self._whole = cuts, refs, whole
        self._errors = errors or {}
        self._on_cut = on_cut

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        self.requests.append(request)
        error = self._errors.get(len(self.requests))
        for index in range(request.n):
            begin, end, reason, ref = self._span(request, index)
            for k in range(begin, end):
                yield rollout_pb2.GenerateResponse(
                    index=index,
                    token_ids=[k],
                    logprobs=[-ref.version - k / 8],
                    text=chr(ord("a") + k),
                    adapter=ref_to_proto(ref),
                )
                if error:
                    raise error
            if reason == ABORT:
                self._on_cut()
            yield rollout_pb2.GenerateResponse(
                index=index, adapter=ref_to_proto(ref), finish_reason=reason
            )

    def _span(
        self, request: rollout_pb2.GenerateRequest, index: int
    ) -> tuple[int, int, rollout_pb2.FinishReason, AdapterRef]:
        """First token, the one after the last, why it ends there, and who makes them."""
        begin = len(request.prefix_token_ids)
        assert list(request.prefix_token_ids) == list(range(begin))
        passed = sum(cut <= begin for cut in self._cuts) if begin else 0
        ref = self._refs[min(passed, len(self._refs) - 1)]
        if passed == len(self._cuts):
            return begin, request.sampling.max_tokens, LENGTH, ref
        reason = STOP if request.n > 1 and index in self._whole else ABORT
        return begin, self._cuts[passed], reason, ref


def counted(
    *versions: tuple[int, int], reason: rollout_pb2.FinishReason = LENGTH, resumed: int = 0
) -> Completion:
    """A completion of such a replica, its tokens made by these versions."""
    made_by = [version for version, count in versions for _ in range(count)]
    return Completion(
        token_ids=list(range(len(made_by))),
        logprobs=[-version - k / 8 for k, version in enumerate(made_by)],
        text="".join(chr(ord("a") + k) for k in range(len(made_by))),
        versions=list(versions),
        finish_reason=reason,
        resumed=resumed,
    )
