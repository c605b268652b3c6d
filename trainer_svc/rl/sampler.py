"""Completions from the fleet: one prompt to one replica, elsewhere if that one fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grpc
from refit.v1 import rollout_pb2

from common.adapter import AdapterRef
from common.errors import CorruptUpdate, InvalidField, Unavailable, WaitExpired
from common.tasks import cancel, gather_or_cancel
from common.wire import ref_to_proto
from trainer_svc.fleet import Fleet, Replica
from trainer_svc.rl.completion import Completion
from trainer_svc.rl.question import AGAIN_SECONDS, Question

log = logging.getLogger(__name__)

_BUSY = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ALREADY_EXISTS)
"""Nobody's fault: the replica's queue is full, or an earlier try of this group still runs there."""

_PUSHBACK = "grpc-retry-pushback-ms"
"""Trailing metadata: when a replica that is full wants to be asked again."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole group, and whether more than one replica was asked for it at the same time."""

    completions: list[Completion]
    hedged: bool


class Sampler:
    """Samples groups of completions of the policy.

    Args:
        published: every version that may answer, as it was published; looked at anew each time.
        hedge_after_seconds: a group still unanswered so long after it was first sent is sent to a
            second replica as well; None never does.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        run_id: str,
        adapter: str,
        params: rollout_pb2.SamplingParams,
        group_size: int,
        published: Mapping[int, AdapterRef],
        hedge_after_seconds: float | None = None,
    ) -> None:
        self._fleet = fleet
        self._run_id = run_id
        self._adapter = adapter
        self._params = params
        self._group_size = group_size
        self._published = published
        self._hedge_after_seconds = hedge_after_seconds

    async def group(
        self, prompt_ids: Sequence[int], *, request_id: str, version: int, timeout_seconds: float
    ) -> Answer:
        """A whole group, at `version` or newer: from one replica, unless it is cut off there.

        A replica that fails is avoided for a while and nothing of its answer is kept. Every try
        carries the same `request_id`, so that a replica which already did the work gives its answer
        again, and every sample counts once.

        A completion that was cut off, by `swap = "abort"` or a replica that stops, keeps its
        tokens; the rest is sampled by whichever replica is free, at `version` or newer as well.

        Raises:
            WaitExpired: no replica answered in time.
            InvalidField: the request itself was refused: by two replicas, or by the only one.
        """
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        question = Question(self._request(prompt_ids, request_id, version), deadline)
        completions = await self._first_answer(question)
        hedged = await gather_or_cancel(
            self._complete(completion, question, index=index)
            for index, completion in enumerate(completions)
        )
        return Answer(completions, question.hedged or any(hedged))

    async def _complete(self, completion: Completion, group: Question, *, index: int) -> bool:
        """Sample what is missing of one that was cut off; whether that was hedged."""
        hedged = False
        while completion.was_cut_off:
            question = group.rest_of(completion, index=index)
            (rest,) = await self._first_answer(question)
            completion.resume(rest)
            hedged |= question.hedged
        return hedged

    async def _first_answer(self, question: Question) -> list[Completion]:
        """That of one replica, or of the quicker of two."""
        tasks = [asyncio.ensure_future(self._answer(question))]
        if self._hedge_after_seconds is not None:
            tasks.append(asyncio.ensure_future(self._hedge(question, self._hedge_after_seconds)))
        try:
            # Both give up at the same deadline, and a request that two replicas refused is no good
            # anywhere: the first end decides, whatever it is.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return min(done, key=lambda task: task.exception() is not None).result()
        finally:
            await cancel(*tasks)

    def _request(
        self, prompt_ids: Sequence[int], request_id: str, version: int
    ) -> rollout_pb2.GenerateRequest:
        return rollout_pb2.GenerateRequest(
            request_id=request_id,
            token_ids=rollout_pb2.TokenIds(ids=prompt_ids),
            n=self._group_size,
            sampling=self._params,
            adapter=rollout_pb2.AdapterSelector(
                run_id=self._run_id,
                adapter=self._adapter,
                rule=rollout_pb2.VERSION_RULE_AT_LEAST,
                version=version,
            ),
        )

    async def _hedge(self, question: Question, after_seconds: float) -> list[Completion]:
        await question.sent.wait()
        await asyncio.sleep(after_seconds)
        return await self._answer(question)

    async def _answer(self, question: Question) -> list[Completion]:
        """Ask one replica after the other until one answers."""
        while (left := question.left_seconds()) > 0:
            avoid = question.avoided()
            if not await self._fleet.wait_for_any(
                self._adapter,
                question.version,
                avoid=avoid,
                timeout_seconds=question.pause_seconds(),
            ):
                continue
            with (
                self._fleet.leased(self._adapter, question.version, avoid=avoid) as replica,
                question.put_to(replica),
            ):
                # Another replica must have time to answer if this one hangs.
                share = left / 2 if len(self._fleet.replicas) > 1 else left
                completions = await self._ask(replica, question, timeout_seconds=share)
                if completions is not None:
                    return completions
        raise WaitExpired(
            f"generate: no replica that serves {self._adapter}@{question.version} answered in "
            f"time; tried {sorted(question.asked) or 'none'}{question.why()}"
        )

    async def _ask(
        self, replica: Replica, question: Question, *, timeout_seconds: float
    ) -> list[Completion] | None:
        """This replica's answer, or None and it rests; the fleet hears how it did."""
        try:
            completions = await self._generate(replica, question, timeout_seconds=timeout_seconds)
        except grpc.aio.AioRpcError as error:
            await self._judge(replica, question, error)
            return None
        except Unavailable as error:
            log.warning("replica %s: %s", replica.id, error)
            question.failures[replica.id] = str(error)
            question.rest(replica)
            self._fleet.failed(replica, str(error))
            return None
        except CorruptUpdate as error:
            log.error("replica %s: %s", replica.id, error)
            question.failures[replica.id] = str(error)
            question.rest(replica)
            self._fleet.quarantine(replica, str(error))
            return None
        if all(c.was_cut_off and not c.token_ids for c in completions):
            log.info("replica %s was stopped before it had an answer", replica.id)
            question.rest(replica)
            return None
        for refuser in question.refusals.values():
            self._fleet.failed(refuser, question.failures[refuser.id])
        self._fleet.answered(replica)
        return completions

    async def _judge(
        self, replica: Replica, question: Question, error: grpc.aio.AioRpcError
    ) -> None:
        """Whose fault it was: nobody's, this replica's, or the request's, which raises."""
        reason = f"{error.code().name} {error.details()}"
        log.warning("replica %s did not answer a group: %s", replica.id, reason)
        question.failures[replica.id] = reason
        question.rest(replica, _pause_seconds(error))
        if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
            await self._refused(replica, question, reason)
        elif error.code() not in _BUSY:
            self._fleet.failed(replica, reason)

    async def _refused(self, replica: Replica, question: Question, reason: str) -> None:
        """Raises `InvalidField` where another replica refused as well, or none is left to ask.

        Until another one answers, nobody knows that the fault was this replica's.
        """
        question.refusals[replica.id] = replica
        others = len(question.refusals) == 1 and await self._fleet.wait_for_any(
            self._adapter, question.version, avoid=frozenset({replica.id}), timeout_seconds=0
        )
        if not others:
            raise InvalidField(f"generate: replica {replica.id} refused the request: {reason}")

    async def _generate(
        self, replica: Replica, question: Question, *, timeout_seconds: float
    ) -> list[Completion]:
        """Raises `CorruptUpdate` for other weights than asked for, `Unavailable` for half a group.

        A completion that was cut off counts as ended.
        """
        completions = [Completion() for _ in range(question.request.n)]
        call = replica.stub.Generate(question.request, timeout=timeout_seconds)
        with contextlib.ExitStack() as stack:
            stack.callback(call.cancel)
            try:
                async for part in call:
                    self._check_weights(part, question.version)
                    _append(completions, part)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                # Closing the channel of a replica that left cancels the call, not this task.
                raise Unavailable("it left while it was answering") from None
        if any(not c.finish_reason for c in completions):
            raise Unavailable("the answer ended before all of its completions did")
        return completions

    def _check_weights(self, part: rollout_pb2.GenerateResponse, version: int) -> None:
        """The tokens were made by the very bytes that were published, or the sample is void."""
        made_by = part.adapter
        if not part.HasField("adapter"):
            raise CorruptUpdate("answered with the base model")
        expected = self._published.get(made_by.version)
        if expected is None or ref_to_proto(expected) != made_by:
            raise CorruptUpdate(
                f"answered with {made_by.adapter}@{made_by.version} (run {made_by.run_id}, "
                f"{made_by.digest.hex()[:12]}); published was {expected or 'no such version'}"
            )
        if made_by.version < version:
            raise CorruptUpdate(f"answered with {expected}; asked for was at least {version}")


def _append(completions: list[Completion], part: rollout_pb2.GenerateResponse) -> None:
    if not 0 <= part.index < len(completions):
        raise Unavailable(f"answered with completion {part.index} of {len(completions)}")
    completions[part.index].add(part)


def _pause_seconds(error: grpc.aio.AioRpcError) -> float:
    """What the replica asks for, or `AGAIN_SECONDS` where that is no time from now on."""
    for key, value in error.trailing_metadata() or ():
        if key == _PUSHBACK and str(value).isdecimal():
            return int(value) / 1000
    return AGAIN_SECONDS
