"""A replica that answers with groups, or breaks as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from refit.v1 import rollout_pb2, rollout_pb2_grpc

from common.adapter import AdapterRef
from common.errors import RefitError
from common.grpc_server import Context
from common.wire import ref_to_proto
from tests.adapters import make_adapter, make_ref

MANIFEST, _ = make_adapter()
OLD, REF = make_ref(MANIFEST, version=2), make_ref(MANIFEST, version=3)
STOP, ABORT = rollout_pb2.FINISH_REASON_STOP, rollout_pb2.FINISH_REASON_ABORT
Response = rollout_pb2.GenerateResponse


class Replica(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers two completions; fails after their first tokens, `failures` times, when told to."""

    def __init__(
        self,
        *,
        error: RefitError | None = None,
        failures: int = 99,
        ref: AdapterRef | None = REF,
        ends: tuple[rollout_pb2.FinishReason, ...] = (STOP, STOP),
        hangs: bool = False,
    ) -> None:
        self.requests: list[rollout_pb2.GenerateRequest] = []
        self.cancelled = 0
        self._error, self._failures, self._ref = error, failures, ref
        self._ends, self._hangs = ends, hangs

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[Response]:
        self.requests.append(request)
        made_by = ref_to_proto(self._ref) if self._ref else None
        for index in (1, 0):
            yield Response(
                index=index, token_ids=[index], logprobs=[-1.0 - index], text="a", adapter=made_by
            )
        if self._hangs:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        if self._error and len(self.requests) <= self._failures:
            raise self._error
        for index, reason in enumerate(self._ends):
            yield Response(
                index=index,
                token_ids=[9],
                logprobs=[-0.5],
                text="b",
                adapter=made_by,
                finish_reason=reason,
            )
