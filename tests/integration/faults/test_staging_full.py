"""A staging file system without room."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from refit.v1 import adapter_pb2, trainer_pb2

from tests.eventually import eventually
from tests.integration.faults.processes import SECONDS, Processes, staged
from tests.integration.faults.run import called, running

pytestmark = pytest.mark.timeout(60)
_FITS = 1 << 14
"""1 MiB, in a file system of 4."""

_TOO_LARGE = 1 << 16


async def test_an_update_without_room_is_refused_and_the_next_one_taken(
    processes: Processes,
) -> None:
    """faults.md 26, dynamo#8630: what is served stays, and nothing of the other is left.

    The replica has a mount of its own, in a namespace of its own."""
    processes.staging.mkdir()
    script = f'mount -t tmpfs -o size=4m none {processes.staging} && exec "$@"'
    user = () if os.geteuid() == 0 else ("--map-root-user",)
    async with running(processes, delta="never") as run:
        first = run.publish(width=_FITS)
        replica = await processes.replica(
            run.address, prefix=("unshare", "--mount", *user, "sh", "-c", script, "sh")
        )
        await run.ready(replica)
        async with called(replica, run.refs.values()) as answers:
            await eventually(lambda: answers, seconds=SECONDS)
            too_large = run.publish(width=_TOO_LARGE)
            await eventually(lambda: run.status(replica).refusal != "", seconds=SECONDS)
            status = run.status(replica)
            assert status.refusal_stage == adapter_pb2.UPDATE_STAGE_STAGE
            assert f"staging directory {processes.staging}" in status.refusal
            assert "No space left on device; an update needs 4194872 bytes" in status.refusal
            assert status.state == trainer_pb2.REPLICA_STATE_QUARANTINED
            assert status.reason == f"refused {too_large}: {status.refusal}"
            assert await replica.listing() == [first]
            assert set(answers) == {1}

            third = run.publish(width=_FITS)
            await run.ready(replica)
        its_root = Path(f"/proc/{replica.process.pid}/root")
        staging = its_root.joinpath(*processes.staging.parts[1:])
        await eventually(lambda: staged(staging) == [1], seconds=SECONDS)
        assert await replica.listing() == [third]
