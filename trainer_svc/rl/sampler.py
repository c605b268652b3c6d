"""Completions from the fleet: one prompt to one replica, elsewhere if that one fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
from refit.v1 import rollout_pb2

from common.errors import CorruptUpdate, InvalidField, Unavailable, WaitExpired
from common.wire import ref_from_proto
from trainer_svc.fleet import Fleet, Replica

log = logging.getLogger(__name__)

_OWN_FAULT = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""The request's fault, the same on every replica. After any other status another one may answer."""

_AGAIN_SECONDS = 1.0
"""Pause before replicas that failed a group are asked for it again, when there are no others."""


@dataclass(slots=True)
class Completion:
    """One sampled answer: token ids, and each one's log-probability when it was sampled."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    version: int = 0
    finish_reason: rollout_pb2.FinishReason = rollout_pb2.FINISH_REASON_UNSPECIFIED


class Sampler:
    """Samples groups of completions of the policy's newest version."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        run_id: str,
        adapter: str,
        params: rollout_pb2.SamplingParams,
        group_size: int,
    ) -> None:
        self._fleet = fleet
        self._run_id = run_id
        self._adapter = adapter
        self._params = params
        self._group_size = group_size

    async def group(
        self, prompt_ids: Sequence[int], *, version: int, timeout_seconds: float
    ) -> list[Completion]:
        """A whole group, from one replica, at `version` or newer.

        A replica that fails is avoided for this group and nothing of its answer is kept, so that
        every sample counts once.

        Raises:
            WaitExpired: no replica answered in time.
            InvalidField: the request itself was refused, and would be everywhere.
        """
        avoid: frozenset[str] = frozenset()
        tried: set[str] = set()
        now = asyncio.get_running_loop().time
        deadline = now() + timeout_seconds
        while (left := deadline - now()) > 0:
            if not await self._fleet.wait_for_any(
                self._adapter, version, avoid=avoid, timeout_seconds=min(left, _AGAIN_SECONDS)
            ):
                avoid = frozenset()
                continue
            with self._fleet.leased(self._adapter, version, avoid=avoid) as replica:
                # Another replica must have time to answer if this one hangs.
                share = left / 2 if len(self._fleet.replicas) > 1 else left
                try:
                    return await self._generate(replica, prompt_ids, version, timeout_seconds=share)
                except grpc.aio.AioRpcError as error:
                    _raise_if_own_fault(replica, error)
                    log.warning("replica %s failed a group: %s", replica.id, error.details())
                except Unavailable as error:
                    log.warning("replica %s: %s", replica.id, error)
                avoid |= {replica.id}
                tried.add(replica.id)
        raise WaitExpired(
            f"generate: no replica that serves {self._adapter}@{version} answered within "
            f"{timeout_seconds:g} s; tried {sorted(tried) or 'none'}"
        )

    async def _generate(
        self,
        replica: Replica,
        prompt_ids: Sequence[int],
        version: int,
        *,
        timeout_seconds: float,
    ) -> list[Completion]:
        request = rollout_pb2.GenerateRequest(
            request_id=uuid.uuid4().hex,
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
        completions = [Completion() for _ in range(self._group_size)]
        call = replica.stub.Generate(request, timeout=timeout_seconds)
        with contextlib.ExitStack() as stack:
            stack.callback(call.cancel)
            async for part in call:
                self._check_weights(replica, part)
                _append(completions[part.index], part)
        if any(c.finish_reason not in _WHOLE for c in completions):
            raise Unavailable("the answer ended before all of its completions did")
        return completions

    def _check_weights(self, replica: Replica, part: rollout_pb2.GenerateResponse) -> None:
        """The tokens were made by the very bytes that were published, or the sample is void."""
        ref = ref_from_proto(part.adapter)
        committed = replica.committed.get((ref.adapter, ref.version), ref)
        if committed != ref or ref.run_id != self._run_id:
            raise CorruptUpdate(
                f"replica {replica.id} answered with {ref} in run {self._run_id}; its report said "
                f"{committed}"
            )


_WHOLE = (rollout_pb2.FINISH_REASON_STOP, rollout_pb2.FINISH_REASON_LENGTH)


def _raise_if_own_fault(replica: Replica, error: grpc.aio.AioRpcError) -> None:
    if error.code() in _OWN_FAULT:
        raise InvalidField(
            f"generate: replica {replica.id} refused the request: {error.code().name} "
            f"{error.details()}"
        ) from error


def _append(completion: Completion, part: rollout_pb2.GenerateResponse) -> None:
    completion.token_ids.extend(part.token_ids)
    completion.logprobs.extend(part.logprobs)
    completion.text += part.text
    completion.version = part.adapter.version
    completion.finish_reason = part.finish_reason
