"""Relays that die or freeze with an update half passed on."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from tests.eventually import eventually
from tests.integration.faults.processes import SECONDS, WIDTH, Processes, ReplicaProcess, staged
from tests.integration.faults.run import Run, called, running
from tests.proxy import Proxy

pytestmark = pytest.mark.timeout(90)
_TOTAL_BYTES = 64 * WIDTH
_LEASE_SECONDS = 4.0
_SETTINGS = {"heartbeat_seconds": 1.0, "lease_seconds": _LEASE_SECONDS, "chunk_bytes": 1 << 16}


@dataclass(frozen=True, slots=True)
class Tree:
    """Replicas of which the first, behind a slow link, has part of an update and passes it on."""

    run: Run
    parent: ReplicaProcess
    children: list[ReplicaProcess]
    others: list[ReplicaProcess]
    proxy: Proxy

    @property
    def survivors(self) -> list[ReplicaProcess]:
        return self.children + self.others

    def check_parents(self, *, fan_out: int) -> None:
        """Nobody has more than `fan_out` below, and nobody hangs on one that is gone."""
        parents = [member.subscription.parent for member in self.run.node.fleet.replicas]
        ids = [parent.replica_id if parent else "" for parent in parents]
        assert max(map(ids.count, ids)) <= fan_out
        assert set(ids) <= {"", *(member.id for member in self.run.node.fleet.replicas)}


@asynccontextmanager
async def half_passed_on(
    processes: Processes, *, fan_out: int, replicas: int
) -> AsyncIterator[Tree]:
    async with running(processes, fan_out=fan_out, **_SETTINGS) as run, Proxy(run.address) as proxy:
        run.publish()
        started = []
        for address in [proxy.address] + [run.address] * (replicas - 1):
            started.append(await processes.replica(address))
            await run.ready(*started)
        parent = started[0]
        children = [r for r in started if run.status(r).parent == run.status(parent).replica_id]
        others = [r for r in started[1:] if r not in children]
        assert len(children) == fan_out
        proxy.bytes_per_second, begun_bytes = 1e6, proxy.passed_bytes
        run.publish()
        await eventually(
            lambda: proxy.passed_bytes - begun_bytes > _TOTAL_BYTES / 3, seconds=SECONDS
        )
        yield Tree(run, parent, children, others, proxy)


@pytest.mark.parametrize(("fan_out", "replicas"), [(1, 4), (2, 5)])
async def test_the_children_of_a_killed_relay_get_the_rest_elsewhere(
    fan_out: int, replicas: int, processes: Processes
) -> None:
    """faults.md 1 and 23, verl#7495, prime-rl#2230: the whole fleet ends with the version."""
    async with half_passed_on(processes, fan_out=fan_out, replicas=replicas) as tree:
        run = tree.run
        async with called(tree.children[0], run.refs.values()):
            await tree.parent.kill()
            await run.left(tree.parent, "its subscription ended")
            await run.ready(*tree.survivors)
        tree.check_parents(fan_out=fan_out)
        for child in tree.children:
            assert 0 < run.status(child).wire_bytes < 0.9 * _TOTAL_BYTES
        for replica in tree.survivors:
            assert await replica.listing() == list(run.refs.values())
        fresh = await processes.replica(run.address)
        await run.ready(fresh)
        await eventually(
            lambda: staged(processes.staging) == [1, *[2] * (replicas - 1)], seconds=SECONDS
        )


async def test_the_children_of_a_frozen_relay_get_the_rest_elsewhere(processes: Processes) -> None:
    """faults.md 23, TRL#6797: its silence ends after three of its heartbeats of 5 s.

    When it wakes up it finds its place taken, and follows as another's child."""
    async with half_passed_on(processes, fan_out=1, replicas=3) as tree:
        run = tree.run
        async with called(tree.children[0], run.refs.values()):
            tree.parent.stop()
            await run.left(tree.parent, f"it was silent for {_LEASE_SECONDS:g} s, its lease")
            await run.ready(*tree.survivors)
        tree.proxy.bytes_per_second = None
        tree.parent.process.send_signal(signal.SIGCONT)
        await run.ready(tree.parent)
        tree.check_parents(fan_out=1)
        for replica in (tree.parent, *tree.survivors):
            assert await replica.listing() == list(run.refs.values())
        await eventually(lambda: staged(processes.staging) == [2, 2, 2], seconds=SECONDS)
