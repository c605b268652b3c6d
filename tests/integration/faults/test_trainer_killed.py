"""Trainers killed and started again where the replicas look for one."""

from __future__ import annotations

import asyncio

import pytest
from refit.v1 import rollout_pb2

from common.adapter import AdapterRef
from common.wire import ref_from_proto
from tests.eventually import eventually
from tests.integration.faults.processes import (
    SECONDS,
    WIDTH,
    Processes,
    ReplicaProcess,
    TrainerProcess,
    staged,
)
from tests.integration.faults.run import called
from tests.proxy import Proxy

pytestmark = pytest.mark.timeout(60)
SHORT = ("heartbeat_seconds=1", "lease_seconds=4", "chunk_bytes=65536")
READY = [("READY", "serves what the run asks for")]
_TOTAL_BYTES = 64 * WIDTH
_SLOW = 1e6


async def _again(
    trainer: TrainerProcess, processes: Processes, *, run_id: str = "run"
) -> TrainerProcess:
    """Kill the trainer, and start one on its port."""
    await trainer.kill()
    return await processes.trainer(*SHORT, f"port={trainer.port}", run_id=run_id)


async def _half_received(
    trainer: TrainerProcess, replica: ReplicaProcess, proxy: Proxy
) -> AdapterRef:
    """A second version, of which the replica has a third at least."""
    first = await trainer.publish(1)
    await replica.serves(first)
    proxy.bytes_per_second, begun_bytes = _SLOW, proxy.passed_bytes
    second = await trainer.publish(2)
    await eventually(lambda: proxy.passed_bytes - begun_bytes > _TOTAL_BYTES / 3, seconds=SECONDS)
    assert await replica.listing() == [first]
    return second


async def test_a_trainer_killed_before_its_first_version_is_found_again(
    processes: Processes,
) -> None:
    """faults.md 6, miles#1724: nobody serves an adapter that is not there."""
    trainer = await processes.trainer(*SHORT)
    replica = await processes.replica(trainer.address)
    await eventually(lambda: "the run is starting" in processes.log("replica"), seconds=SECONDS)

    trainer = await _again(trainer, processes)
    assert await replica.listing() == []
    first = await trainer.publish(1)

    await replica.serves(first)
    await trainer.shows(READY)


async def test_a_trainer_killed_while_idle_goes_on_with_its_run(processes: Processes) -> None:
    """faults.md 5, ART#661: the replica serves throughout, and follows."""
    trainer = await processes.trainer(*SHORT)
    replica = await processes.replica(trainer.address)
    published = [await trainer.publish(1)]
    await replica.serves(published[0])
    published.append(await trainer.publish(2))
    await replica.serves(published[1])

    async with called(replica, published):
        trainer = await _again(trainer, processes)
        published.append(await trainer.publish(3))
        await replica.serves(published[2])
        await trainer.shows(READY)
    await eventually(lambda: staged(processes.staging) == [1], seconds=SECONDS)
    assert await replica.listing() == published[2:]


async def test_a_trainer_killed_during_an_update_sends_only_the_rest(processes: Processes) -> None:
    """faults.md 25, prime-rl#2391: what came stays, unseen, and is not sent a second time."""
    trainer = await processes.trainer(*SHORT)
    async with Proxy(trainer.address) as proxy:
        replica = await processes.replica(proxy.address)
        published = [await trainer.publish(1)]
        await replica.serves(published[0])
        async with called(replica, published) as answers:
            published.append(await _half_received(trainer, replica, proxy))
            trainer = await _again(trainer, processes)
            proxy.bytes_per_second = None
            assert set(answers) == {1}
            assert await trainer.publish(2) == published[1]
            await replica.serves(published[1])
            await trainer.shows(READY)
        [status] = await trainer.status()
        assert 0 < status.wire_bytes < 0.75 * _TOTAL_BYTES
        await eventually(lambda: staged(processes.staging) == [1], seconds=SECONDS)


async def test_the_next_run_takes_the_place_of_a_killed_one(processes: Processes) -> None:
    """faults.md 20 and 25, vllm#47724, prime-rl#2395: once its users are gone, and not before.

    Half of the old run's next version is forgotten."""
    trainer = await processes.trainer(*SHORT)
    async with Proxy(trainer.address) as proxy:
        replica = await processes.replica(proxy.address, "engine.token_seconds=0.5")
        first = await trainer.publish(1)
        published = [first]
        await replica.serves(first)
        async with called(replica, published, any_run=True):
            await _half_received(trainer, replica, proxy)
            trainer = await _again(trainer, processes, run_id="next")
            proxy.bytes_per_second = None
            user = asyncio.ensure_future(replica.generate(first, max_tokens=12))
            other = await trainer.publish(1, seed=9)
            published.append(other)
            await _listed(replica, [other])
            assert not user.done()
            parts = await user
        assert {ref_from_proto(part.adapter) for part in parts} == {first}
        assert parts[-1].finish_reason == rollout_pb2.FINISH_REASON_LENGTH
        await trainer.shows(READY)
        await eventually(lambda: staged(processes.staging) == [1], seconds=SECONDS)


async def _listed(replica: ReplicaProcess, refs: list[AdapterRef]) -> None:
    async with asyncio.timeout(SECONDS):
        while await replica.listing() != refs:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
