"""Groups from a fleet whose replicas answer, fail or die."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from refit.v1 import adapter_pb2, rollout_pb2, rollout_pb2_grpc, tensor_pb2, version_pb2

from common.errors import AdapterNotFound, CorruptUpdate, InvalidField, RefitError, WaitExpired
from common.grpc_server import Context, start_server
from common.model_dir import BaseModel
from common.wire import ref_to_proto
from tests.adapters import make_adapter, make_ref
from trainer_svc.fleet import Fleet
from trainer_svc.rl.sampler import Completion, Sampler

MANIFEST, _ = make_adapter()
REF = make_ref(MANIFEST, version=3)
Response = rollout_pb2.GenerateResponse


class Replica(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers two completions; fails after their first tokens, `failures` times, when told to."""

    def __init__(
        self,
        *,
        error: RefitError | None = None,
        failures: int = 99,
        ref: object = REF,
        cut: bool = False,
        hangs: bool = False,
    ) -> None:
        self.requests: list[rollout_pb2.GenerateRequest] = []
        self._error, self._failures, self._ref = error, failures, ref
        self._cut, self._hangs = cut, hangs

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[Response]:
        self.requests.append(request)
        made_by = ref_to_proto(self._ref)  # type: ignore[arg-type]
        for index in (1, 0):
            yield Response(
                index=index, token_ids=[index], logprobs=[-1.0 - index], text="a", adapter=made_by
            )
        if self._hangs:
            await asyncio.Event().wait()
        if self._error and len(self.requests) <= self._failures:
            raise self._error
        for index in (0,) if self._cut else (0, 1):
            yield Response(
                index=index,
                token_ids=[9],
                logprobs=[-0.5],
                text="b",
                adapter=made_by,
                finish_reason=rollout_pb2.FINISH_REASON_STOP,
            )


@contextlib.asynccontextmanager
async def _fleet(*replicas: Replica) -> AsyncIterator[Fleet]:
    fleet = Fleet(BaseModel("m", "f"), published=lambda: [REF])
    fleet.require(MANIFEST)
    async with contextlib.AsyncExitStack() as stack:
        for number, replica in enumerate(replicas):
            server = await start_server(
                functools.partial(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, replica),
                host="127.0.0.1",
                port=0,
                services=[],
            )
            stack.push_async_callback(server.stop, 0)
            request = adapter_pb2.AdapterUpdateRequest(
                replica_id=f"r{number}",
                advertised_address=server.address,
                base_model=version_pb2.BaseModel(fingerprint="f"),
                capabilities=adapter_pb2.ReplicaCapabilities(
                    max_rank=8,
                    target_modules=["q_proj", "k_proj"],
                    dtypes=[tensor_pb2.DTYPE_FLOAT32],
                ),
                held=[ref_to_proto(REF)],
            )
            stack.enter_context(fleet.joined(request))
        yield fleet
    await fleet.close()


def _sampler(fleet: Fleet) -> Sampler:
    params = rollout_pb2.SamplingParams(max_tokens=2)
    return Sampler(fleet, run_id="run", adapter="default", params=params, group_size=2)


async def test_a_group_is_put_together_by_index() -> None:
    replica = Replica()
    async with _fleet(replica) as fleet:
        group = await _sampler(fleet).group([5, 6], version=3, timeout_seconds=5)

    stop = rollout_pb2.FINISH_REASON_STOP
    assert group == [
        Completion([0, 9], [-1.0, -0.5], "ab", 3, stop),
        Completion([1, 9], [-2.0, -0.5], "ab", 3, stop),
    ]
    request = replica.requests[0]
    assert (list(request.token_ids.ids), request.n) == ([5, 6], 2)
    assert request.adapter.rule == rollout_pb2.VERSION_RULE_AT_LEAST
    selector = request.adapter
    assert (selector.run_id, selector.adapter, selector.version) == ("run", "default", 3)


@pytest.mark.parametrize(
    "broken",
    [
        Replica(error=AdapterNotFound("gone")),
        Replica(error=RefitError("INTERNAL, by its status")),
        Replica(cut=True),
        Replica(hangs=True),
    ],
)
async def test_a_group_that_breaks_is_sampled_elsewhere_and_counted_once(broken: Replica) -> None:
    """faults.md 24, SkyRL#2035: nothing of the broken answer is kept."""
    whole = Replica()
    async with _fleet(broken, whole) as fleet:
        group = await _sampler(fleet).group([5], version=3, timeout_seconds=2)
        assert [replica.outstanding for replica in fleet.replicas] == [0, 0]

    assert [c.token_ids for c in group] == [[0, 9], [1, 9]]
    assert broken.requests[0].request_id != whole.requests[0].request_id


async def test_the_only_replica_is_asked_again_after_a_hiccup() -> None:
    replica = Replica(error=AdapterNotFound("not yet"), failures=1)
    async with _fleet(replica) as fleet:
        group = await _sampler(fleet).group([5], version=3, timeout_seconds=5)

    assert len(group) == len(replica.requests) == 2


async def test_when_every_replica_failed_the_wait_has_an_end() -> None:
    """faults.md 23, prime-rl#2230."""
    async with _fleet(Replica(error=AdapterNotFound("gone"))) as fleet:
        with pytest.raises(WaitExpired, match=r"tried \['r0'\]"):
            await _sampler(fleet).group([5], version=3, timeout_seconds=0.5)


async def test_a_request_refused_for_its_own_fault_is_not_tried_again() -> None:
    other = Replica()
    async with _fleet(Replica(error=InvalidField("sampling.top_p: 2")), other) as fleet:
        with pytest.raises(InvalidField, match=r"INVALID_ARGUMENT sampling\.top_p: 2"):
            await _sampler(fleet).group([5], version=3, timeout_seconds=5)

    assert other.requests == []


@pytest.mark.parametrize("other", [{"digest": b"x" * 32}, {"run_id": "old", "version": 9}])
async def test_tokens_made_by_other_bytes_are_void(other: dict[str, Any]) -> None:
    """faults.md 2, verl#3821: a sample is attributable to the bytes that made it."""
    async with _fleet(Replica(ref=replace(REF, **other))) as fleet:
        with pytest.raises(CorruptUpdate, match="answered with"):
            await _sampler(fleet).group([5], version=3, timeout_seconds=5)
