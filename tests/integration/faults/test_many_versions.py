"""What adds up over hundreds of versions: nothing."""

from __future__ import annotations

import psutil
import pytest

from tests.eventually import eventually
from tests.integration.faults.processes import SECONDS, Process, Processes, staged

pytestmark = pytest.mark.timeout(90)
_WIDTH = 1 << 12
_ADAPTER_BYTES = 64 * _WIDTH
_VERSIONS = 300
_FREED = {"MALLOC_MMAP_THRESHOLD_": "100000"}


async def test_memory_and_slots_level_off(processes: Processes) -> None:
    """faults.md 27, AReaL#1385, vllm#42207: 300 versions of 256 KiB in two processes."""
    trainer = await processes.trainer("delta=always", env=_FREED)
    replica = await processes.replica(trainer.address, env=_FREED)
    grown_from = dict[Process, int]()
    for version in range(1, _VERSIONS + 1):
        await replica.serves(await trainer.publish(version, width=_WIDTH))
        if version == _VERSIONS // 3:
            grown_from = {process: _memory_bytes(process) for process in (trainer, replica)}
    for process, before_bytes in grown_from.items():
        # A tenth of what 200 versions weigh.
        assert _memory_bytes(process) - before_bytes < 20 * _ADAPTER_BYTES
    await eventually(lambda: staged(processes.staging) == [2], seconds=SECONDS)
    assert await replica.listing() == trainer.published[-2:]


def _memory_bytes(process: Process) -> int:
    return int(psutil.Process(process.process.pid).memory_info().rss)
