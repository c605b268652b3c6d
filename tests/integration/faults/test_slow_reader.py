"""One replica behind a link that cannot follow."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from tests.integration.faults.processes import Processes, ReplicaProcess, TrainerProcess
from tests.integration.faults.run import called
from tests.proxy import Proxy

pytestmark = pytest.mark.timeout(60)
_WIDTH = 1 << 17
_ADAPTER_BYTES = 64 * _WIDTH
"""8 MiB, of which the slow one takes a thirtieth while the others take it whole, and again."""

_UPDATES = 6
_SLACK_SECONDS = 0.1
_SLACK_BYTES = 8 << 20


async def test_a_slow_replica_slows_nobody_and_costs_no_memory(processes: Processes) -> None:
    """faults.md 23, TRL#6797: the others get version after version while it reads its first."""
    # So that what is freed is seen to be.
    env = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    trainer = await processes.trainer("chunk_bytes=65536", "delta=never", env=env)
    async with Proxy(trainer.address) as proxy:
        fast = [await processes.replica(trainer.address) for _ in range(2)]
        alone_seconds = await _update_seconds(trainer, fast)
        slow = await processes.replica(proxy.address)
        joined = trainer.published[-1]
        await slow.serves(joined)
        proxy.bytes_per_second = 200e3
        refs = trainer.published
        async with called(slow, refs) as slow_answers, called(fast[0], refs):
            before_bytes = _memory_bytes(trainer)
            beside_seconds = await _update_seconds(trainer, fast)
            grown_bytes = _memory_bytes(trainer) - before_bytes
            await trainer.shows([*_READY * 2, ("CATCHING_UP", f"default@{joined.version} of")])
            print(f"{alone_seconds:.3f} s, {beside_seconds:.3f} s, {grown_bytes} bytes")
            assert set(slow_answers) == {joined.version}
            assert beside_seconds < 1.5 * alone_seconds + _SLACK_SECONDS
            # For it the version that it reads is kept, beside the two newest.
            assert grown_bytes < _ADAPTER_BYTES + _SLACK_BYTES // 2
            proxy.bytes_per_second = None
            await slow.serves(refs[-1])
            await trainer.shows(_READY * 3)


_READY = [("READY", "serves what the run asks for")]


async def _update_seconds(trainer: TrainerProcess, replicas: list[ReplicaProcess]) -> float:
    """From the order to publish to the last one's answer; the best of some."""
    now = asyncio.get_running_loop().time
    seconds = []
    for _ in range(_UPDATES):
        begun = now()
        ref = await trainer.publish(len(trainer.published) + 1, width=_WIDTH)
        await asyncio.gather(*(replica.serves(ref) for replica in replicas))
        seconds.append(now() - begun)
    return min(seconds)


def _memory_bytes(trainer: TrainerProcess) -> int:
    return int(psutil.Process(trainer.process.pid).memory_info().rss)
