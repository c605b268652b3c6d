"""The ranks as real processes under torchrun."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from common.adapter import Manifest
from common.errors import ConfigError, WaitExpired, WorkerGone, WorkerLost
from common.stream.verifier import Verifier
from trainer_svc.megatron.client import MegatronWorker
from trainer_svc.megatron.protocol import Batch
from trainer_svc.megatron.settings import WorkerSettings

START_SECONDS = 60.0
DEADLINE_SECONDS = 30.0


def children(pid: int) -> list[int]:
    """Process ids of the children of `pid`."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.timeout(180)
async def test_a_worker_trains_exports_dies_and_resumes(
    settings: WorkerSettings, batch: Batch, tmp_path: Path
) -> None:
    worker = MegatronWorker(num_ranks=1, max_restarts=1)
    async with worker:
        await worker.wait_connected(deadline_seconds=START_SECONDS)
        with pytest.raises(WorkerLost, match="new ranks cannot run step; init"):
            await worker.step(batch, deadline_seconds=DEADLINE_SECONDS)
        lost = settings.model_copy(update={"model_dir": tmp_path / "none"})
        with pytest.raises(ConfigError, match="model_dir: found no"):
            await worker.init(lost, deadline_seconds=DEADLINE_SECONDS)

        await worker.init(settings, deadline_seconds=DEADLINE_SECONDS)
        metrics = await worker.step(batch, deadline_seconds=DEADLINE_SECONDS)
        assert metrics["tokens"] == 33
        manifest = await _export(worker, tmp_path / "one")
        state = {"step": 1}
        await worker.save(tmp_path / "ckpt", state=state, deadline_seconds=DEADLINE_SECONDS)
        expected = await worker.logprobs(batch, deadline_seconds=DEADLINE_SECONDS)

        (rank,) = children(worker.pid)
        running = asyncio.ensure_future(worker.step(batch, deadline_seconds=DEADLINE_SECONDS))
        await asyncio.sleep(0)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(WorkerLost):
            await running

        await worker.wait_connected(deadline_seconds=START_SECONDS)
        await worker.init(settings, deadline_seconds=DEADLINE_SECONDS)
        assert await worker.load(tmp_path / "ckpt", deadline_seconds=DEADLINE_SECONDS) == state
        assert await worker.logprobs(batch, deadline_seconds=DEADLINE_SECONDS) == expected
        assert await _export(worker, tmp_path / "two") == manifest

        (rank,) = children(worker.pid)
        with pytest.raises(WaitExpired):
            await worker.step(batch, deadline_seconds=0.0)
    assert not alive(rank)
    assert not alive(worker.pid)


@pytest.mark.timeout(180)
async def test_ranks_that_died_idle_take_no_command_before_init(
    settings: WorkerSettings, batch: Batch
) -> None:
    async with MegatronWorker(num_ranks=1, max_restarts=1) as worker:
        await worker.wait_connected(deadline_seconds=START_SECONDS)
        await worker.init(settings, deadline_seconds=DEADLINE_SECONDS)
        (rank,) = children(worker.pid)
        os.kill(rank, signal.SIGKILL)
        await _until(lambda: children(worker.pid) not in ([], [rank]))
        await worker.wait_connected(deadline_seconds=START_SECONDS)
        with pytest.raises(WorkerLost, match="new ranks cannot run step; init"):
            await worker.step(batch, deadline_seconds=DEADLINE_SECONDS)
        await worker.init(settings, deadline_seconds=DEADLINE_SECONDS)
        metrics = await worker.step(batch, deadline_seconds=DEADLINE_SECONDS)
        assert metrics["tokens"] == 33

        (rank,) = children(worker.pid)
        os.kill(rank, signal.SIGKILL)
        await _until(lambda: not alive(worker.pid))
        with pytest.raises(WorkerGone, match="torchrun ended with status 1"):
            await worker.wait_connected(deadline_seconds=START_SECONDS)


@pytest.mark.timeout(90)
async def test_idle_ranks_end_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    async with MegatronWorker(num_ranks=1, max_restarts=0) as worker:
        await worker.wait_connected(deadline_seconds=START_SECONDS)
        (rank,) = children(worker.pid)
    assert not alive(rank)
    assert not alive(worker.pid)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.timeout(90)
async def test_ranks_end_when_they_are_told_to() -> None:
    async with MegatronWorker(num_ranks=1, max_restarts=0) as worker:
        await worker.wait_connected(deadline_seconds=START_SECONDS)
        (rank,) = children(worker.pid)
        await worker.stop(deadline_seconds=DEADLINE_SECONDS)
        assert not alive(rank)
        with pytest.raises(WorkerLost):
            await worker.logprobs(_any_batch(), deadline_seconds=DEADLINE_SECONDS)


async def _until(holds: Callable[[], bool]) -> None:
    def wait() -> None:
        deadline = time.monotonic() + START_SECONDS
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    await asyncio.to_thread(wait)


async def _export(worker: MegatronWorker, path: Path) -> Manifest:
    manifest = await worker.export(path, base_fingerprint="base", deadline_seconds=DEADLINE_SECONDS)
    content = path.read_bytes()
    assert len(content) == manifest.total_bytes
    Verifier(manifest).update(content)
    return manifest


def _any_batch() -> Batch:
    return Batch.from_json(
        {
            "samples": [
                {
                    "prompt_ids": [1],
                    "completion_ids": [2],
                    "rollout_logprobs": [-1.0],
                    "advantage": 1.0,
                }
            ],
            "temperature": 1.0,
        }
    )
