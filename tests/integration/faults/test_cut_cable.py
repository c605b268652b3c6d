"""The connection to the trainer cut in the middle of an update."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import count

import pytest

from tests.eventually import eventually
from tests.integration.faults.processes import SECONDS, WIDTH, Processes, ReplicaProcess, staged
from tests.integration.faults.run import Run, called, running
from tests.proxy import Proxy

pytestmark = pytest.mark.timeout(90)
_TOTAL_BYTES = 64 * WIDTH
_OVERHEAD_BYTES = 10_000
_PART_BYTES = _TOTAL_BYTES / 6
_SLOW = 1e6


@pytest.mark.parametrize(
    ("settings", "lease_seconds", "cut_seconds"),
    [
        ({"heartbeat_seconds": 0.5, "lease_seconds": 2.0}, 2.0, 4.0),
        pytest.param({}, 15.0, 30.0, id="with the defaults"),
    ],
)
async def test_an_update_goes_on_after_a_cut_from_what_came(
    settings: dict[str, float], lease_seconds: float, cut_seconds: float, processes: Processes
) -> None:
    """faults.md 22 and 23, AReaL#1160, prime-rl#2230: it serves meanwhile, and nobody waits."""
    settings = settings | {"chunk_bytes": 1 << 16}
    async with running(processes, **settings) as run, Proxy(run.address) as proxy:
        run.publish()
        far = await processes.replica(proxy.address)
        near = await processes.replica(run.address)
        await run.ready(far, near)
        refs = run.refs.values()
        async with called(far, refs) as answers, called(near, refs):
            begun_bytes, proxy.bytes_per_second = proxy.passed_bytes, _SLOW
            run.publish()
            await eventually(
                lambda: proxy.passed_bytes - begun_bytes > _TOTAL_BYTES / 3, seconds=SECONDS
            )
            proxy.hang()
            cut = asyncio.ensure_future(asyncio.sleep(cut_seconds))
            # TCP gives up after 10 s where it still had bytes to send.
            lease_is_over = f"it was silent for {lease_seconds:g} s, its lease"
            await run.left(far, lease_is_over, "its subscription ended")
            await run.ready(near)
            await cut
            assert answers[-1] == 1
            proxy.bytes_per_second = None
            proxy.heal()
            await run.ready(far)
        member = run.member(far)
        assert member is not None and member.subscription.partial is not None
        ref, received_bytes = member.subscription.partial
        assert ref == run.newest
        assert _TOTAL_BYTES / 4 < received_bytes < _TOTAL_BYTES
        rest = _TOTAL_BYTES - received_bytes
        assert rest < run.status(far).wire_bytes < rest + _OVERHEAD_BYTES
        await eventually(lambda: staged(processes.staging) == [2, 2], seconds=SECONDS)


async def test_an_update_that_is_cut_again_and_again_is_sent_once(processes: Processes) -> None:
    """faults.md 23: every piece that arrives whole is progress."""
    async with (
        running(processes, chunk_bytes=1 << 16) as run,
        Proxy(run.address, bytes_per_second=_SLOW) as proxy,
    ):
        run.publish(width=16)
        replica = await processes.replica(proxy.address)
        await run.ready(replica)
        begun_bytes = proxy.passed_bytes
        async with called(replica, run.refs.values()):
            run.publish()
            for cut in count(1):
                await eventually(
                    partial(_has_come_to, run, replica, proxy, begun_bytes + cut * _PART_BYTES),
                    seconds=SECONDS,
                )
                if run.is_ready(replica):
                    break
                proxy.cut()
        assert cut > 5
        assert proxy.passed_bytes - begun_bytes < 1.5 * _TOTAL_BYTES
        assert await replica.listing() == list(run.refs.values())


def _has_come_to(run: Run, replica: ReplicaProcess, proxy: Proxy, count_bytes: float) -> bool:
    return proxy.passed_bytes > count_bytes or run.is_ready(replica)
