"""Bytes that change on their way, without TLS and past TCP's checksum."""

from __future__ import annotations

import random

import pytest
from refit.v1 import adapter_pb2

from tests.eventually import eventually
from tests.integration.faults.processes import SECONDS, WIDTH, Processes, staged
from tests.integration.faults.run import Run, called, running
from tests.proxy import Proxy
from tests.trainer_process import sized_adapter

pytestmark = pytest.mark.timeout(60)
FLIPS = 10
_TOTAL_BYTES = 64 * WIDTH


async def test_a_damaged_chunk_is_refused_and_comes_again(processes: Processes) -> None:
    """faults.md 4, verl#7327: a byte of the second version changes inside a chunk."""
    async with running(processes) as run, Proxy(run.address) as proxy:
        run.publish()
        replica = await processes.replica(proxy.address)
        await run.ready(replica)
        async with called(replica, run.refs.values()) as answers:
            proxy.bytes_per_second = 2e6
            proxy.corrupt(*_places_in_the_middle(run))
            run.publish()
            await eventually(
                lambda: run.status(replica).refusal_stage == adapter_pb2.UPDATE_STAGE_WIRE,
                seconds=SECONDS,
            )
            assert "chunk.crc32c: differs" in run.status(replica).refusal
            assert set(answers) == {1}
            await run.ready(replica)
        assert processes.log("replica").count("refused default@2: chunk.crc32c") == 1
        assert run.status(replica).refusal == ""
        assert await replica.listing() == list(run.refs.values())
        await eventually(lambda: staged(processes.staging) == [2], seconds=SECONDS)


def _places_in_the_middle(run: Run) -> list[bytes]:
    """Of the next version; where HTTP/2's frames break one, another is whole."""
    _, buffer = sized_adapter(run.node.base.fingerprint, seed=len(run.refs) + 1, width=WIDTH)
    middle = len(buffer) // 2
    return [bytes(buffer[middle + at : middle + at + 16]) for at in range(0, 1 << 10, 16)]


async def test_a_byte_that_changes_anywhere_harms_nothing(processes: Processes) -> None:
    """faults.md 23 and 26, dynamo#8630: in a frame, a message, a manifest or a tensor.

    Whatever it was, the next version is served, and one that is not what was published never."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with (
        running(processes, heartbeat_seconds=0.3, lease_seconds=1.0) as run,
        Proxy(run.address) as proxy,
    ):
        run.publish()
        replica = await processes.replica(proxy.address)
        await run.ready(replica)
        async with called(replica, run.refs.values()):
            for _ in range(FLIPS):
                bound = chance.choice((1_000, _TOTAL_BYTES))
                proxy.flip_after(chance.randrange(bound))
                run.publish()
                await eventually(proxy.damaged.is_set, seconds=SECONDS)
                run.publish()
                await run.ready(replica)
        listing = await replica.listing()
        assert listing[-1] == run.newest
        assert set(listing) <= set(run.refs.values())
        await eventually(lambda: staged(processes.staging) == [len(listing)], seconds=SECONDS)
