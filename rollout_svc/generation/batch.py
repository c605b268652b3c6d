"""Many requests in one stream."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TypeAlias

from refit.v1 import rollout_pb2

from common.errors import InvalidField, RefitError
from common.tasks import cancel, gather_or_cancel

Answer: TypeAlias = Callable[
    [rollout_pb2.GenerateRequest], AsyncGenerator[rollout_pb2.GenerateResponse, None]
]

_MOST = 1024
# A receiver that is slower than the engine holds it up: tokens then come several in a message.
_AHEAD = 64


@dataclass(frozen=True, slots=True)
class Batch:
    """Answers each request by itself.

    Args:
        answer: streams the answer of one; closing it ends the request.
    """

    answer: Answer

    async def answers(
        self, batch: rollout_pb2.GenerateBatchRequest
    ) -> AsyncGenerator[rollout_pb2.GenerateBatchResponse, None]:
        """Messages of all requests as they come; closing the generator ends every one.

        Raises:
            InvalidField: no request, too many, or two with the same id.
        """
        _check(batch)
        queue: asyncio.Queue[rollout_pb2.GenerateBatchResponse | None] = asyncio.Queue(_AHEAD)
        filling = asyncio.ensure_future(self._fill(queue, batch))
        try:
            while not (filling.done() and queue.empty()):
                if message := await queue.get():
                    yield message
            await filling
        finally:
            await cancel(filling)

    async def _fill(
        self,
        queue: asyncio.Queue[rollout_pb2.GenerateBatchResponse | None],
        batch: rollout_pb2.GenerateBatchRequest,
    ) -> None:
        """None in the queue wakes its reader for the end; a full one needs no waking."""
        try:
            await gather_or_cancel(
                self._answer_one(queue, index, request)
                for index, request in enumerate(batch.requests)
            )
        finally:
            with suppress(asyncio.QueueFull):
                queue.put_nowait(None)

    async def _answer_one(
        self,
        queue: asyncio.Queue[rollout_pb2.GenerateBatchResponse | None],
        index: int,
        request: rollout_pb2.GenerateRequest,
    ) -> None:
        try:
            async with aclosing(self.answer(request)) as messages:
                async for message in messages:
                    await queue.put(
                        rollout_pb2.GenerateBatchResponse(request_index=index, response=message)
                    )
        except RefitError as error:
            refused = rollout_pb2.RequestError(
                code=error.code.value[0],
                message=str(error),
                retry_after_seconds=error.retry_after_seconds,
            )
            await queue.put(rollout_pb2.GenerateBatchResponse(request_index=index, error=refused))


def _check(batch: rollout_pb2.GenerateBatchRequest) -> None:
    if not 1 <= len(batch.requests) <= _MOST:
        raise InvalidField(f"requests: {len(batch.requests)}; send 1 to {_MOST} in a batch")
    ids = Counter(request.request_id for request in batch.requests if request.request_id)
    for request_id, count in ids.items():
        if count > 1:
            raise InvalidField(
                f"requests.request_id: {request_id!r} comes {count} times; give each its own"
            )
