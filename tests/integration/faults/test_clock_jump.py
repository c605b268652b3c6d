"""The clock of the wall is set while trainer and replica run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.integration.faults.processes import Processes
from tests.integration.faults.run import called

pytestmark = pytest.mark.timeout(60)
_LEASE_SECONDS = 1.5
_HOUR = 3600


@pytest.mark.parametrize("jump_seconds", [_HOUR, -_HOUR])
async def test_a_clock_that_jumps_changes_nothing(
    jump_seconds: int, processes: Processes, tmp_path: Path
) -> None:
    """faults.md 22 and 23: leases, heartbeats and waits are not by the wall's clock."""
    offset = tmp_path / "offset"
    offset.write_text("0")
    path = f"{Path(__file__).parent / 'clock'}:{Path.cwd()}"
    env = {"PYTHONPATH": path, "CLOCK_OFFSET_FILE": str(offset)}
    settings = ("heartbeat_seconds=0.5", f"lease_seconds={_LEASE_SECONDS}")
    trainer = await processes.trainer(*settings, env=env)
    replica = await processes.replica(trainer.address, "engine.token_seconds=0.2", env=env)
    await replica.serves(await trainer.publish(1))
    async with called(replica, trainer.published):
        running = asyncio.ensure_future(replica.generate(trainer.published[0], max_tokens=12))
        for offset_seconds in (jump_seconds, 0):
            offset.write_text(str(offset_seconds))
            # Long enough for every lease and heartbeat to come to its end.
            for _ in range(5):
                await asyncio.sleep(_LEASE_SECONDS / 3)
                await trainer.shows([("READY", "serves what the run asks for")], seconds=0.5)
            version = len(trainer.published) + 1
            await replica.serves(await trainer.publish(version), seconds=5)
        assert len((await running)[-1].token_ids) > 0
    assert "subscribing again" not in processes.log("replica")
    log = processes.log("trainer")
    assert (log.count(" joined from "), log.count(" left: ")) == (1, 0)
