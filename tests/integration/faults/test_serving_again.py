"""Replicas that begin to serve, or begin again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from refit.v1 import rollout_pb2, trainer_pb2

from tests.eventually import eventually
from tests.integration.faults.processes import SECONDS, WIDTH, Processes, ReplicaProcess
from tests.integration.faults.run import called, running
from tests.proxy import Proxy

pytestmark = pytest.mark.timeout(60)
_TOTAL_BYTES = 64 * WIDTH
_PAUSE_SECONDS = 1.0
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def _health(replica: ReplicaProcess) -> int:
    stub: Any = health_pb2_grpc.HealthStub(replica.channel)
    request = health_pb2.HealthCheckRequest(service="refit.v1.RolloutService")
    return int((await stub.Check(request, timeout=SECONDS)).status)


async def test_a_replica_that_joins_takes_no_prompt_before_it_has_the_version(
    processes: Processes,
) -> None:
    """faults.md 6, miles#1724, prime-rl#1564: while the others serve and are updated."""
    async with running(processes) as run, Proxy(run.address, bytes_per_second=1e6) as proxy:
        run.publish()
        first = await processes.replica(run.address)
        await run.ready(first)
        async with called(first, run.refs.values()):
            late = await processes.replica(proxy.address)
            await eventually(lambda: proxy.passed_bytes > _TOTAL_BYTES / 3, seconds=SECONDS)
            status = run.status(late)
            joining = trainer_pb2.REPLICA_STATE_JOINING
            assert (status.state, status.reason) == (joining, "receives default@1")
            assert await _health(late) == _NOT_SERVING
            assert await late.listing() == []
            with run.node.fleet.leased("default", 1, avoid=frozenset()) as replica:
                assert replica.address == first.address
            run.publish()
            await run.ready(first)
            assert not run.is_ready(late)
            proxy.bytes_per_second = None
            await run.ready(late)
        assert await _health(late) == _SERVING


async def test_a_caller_that_pauses_and_dies_leaves_no_replica_paused(processes: Processes) -> None:
    """faults.md 22, AReaL#1160: nor does an update that comes meanwhile."""
    async with running(processes) as run:
        run.publish()
        replica = await processes.replica(run.address)
        await run.ready(replica)
        now = asyncio.get_running_loop().time
        begun = now()
        request = rollout_pb2.PauseGenerationRequest(lease_seconds=_PAUSE_SECONDS)
        await replica.stub.PauseGeneration(request, timeout=SECONDS)
        waiting = asyncio.ensure_future(replica.generate(run.newest))
        await run.node.fleet.wait_for(
            "default", run.publish().version, replicas=1, timeout_seconds=5, straggler_seconds=0
        )
        await waiting
        assert _PAUSE_SECONDS <= now() - begun < _PAUSE_SECONDS + 2
        await replica.serves(run.newest)
