"""vLLM replicas killed under a real GRPO run."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from refit.v1 import trainer_pb2, trainer_pb2_grpc

from tests.eventually import eventually
from tests.integration.faults.processes import SECONDS, Process, Processes
from tests.integration.services import START_SECONDS
from tests.proxy import Proxy
from trainer_svc.demo import tiny

pytestmark = pytest.mark.timeout(240)


async def test_replicas_killed_at_every_moment_cost_a_run_nothing(tmp_path: Path) -> None:
    """faults.md 1, 23 and 24, verl#7495, TRL#6797, SkyRL#2035."""
    model = tiny.prepare(tmp_path / "tiny")
    async with Processes(model, tmp_path) as processes:
        trainer = await processes.refit(*_trainer_arguments(model, tmp_path), name="trainer")
        stub = trainer_pb2_grpc.TrainerServiceStub(trainer.channel)
        async with Proxy(trainer.address) as proxy:
            addresses = [proxy.address, *[trainer.address] * 3]
            replicas = await asyncio.gather(
                *(
                    processes.refit(*_rollout_arguments(model, tmp_path / name, a), name=name)
                    for name, a in zip("abcd", addresses, strict=True)
                )
            )
            await _ready(stub, replicas)
            await _kill_during_receive(replicas[0], proxy)
            await _kill_during_commit(replicas[1], tmp_path / "b")
            await _kill_during_generation(replicas[2], stub)
            killed_at = len(_rows(tmp_path))
            await eventually(lambda: len(_rows(tmp_path)) > killed_at + 2, seconds=SECONDS)
            await stub.StopRun(trainer_pb2.StopRunRequest(), timeout=SECONDS)
            await eventually((tmp_path / "run/summary.json").exists, seconds=SECONDS)
            status = await stub.GetStatus(trainer_pb2.GetStatusRequest(), timeout=SECONDS)
    _check_records(_rows(tmp_path), json.loads((tmp_path / "run/summary.json").read_text()))
    states = {r.address: (r.state, r.reason) for r in status.replicas}
    lost = (trainer_pb2.REPLICA_STATE_LOST, "its subscription ended")
    assert [states[replica.address] for replica in replicas[:3]] == [lost] * 3
    assert states[replicas[3].address][0] == trainer_pb2.REPLICA_STATE_READY


def _check_records(rows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> None:
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(row["samples_lost"] == 0 and row["samples"] == 16 for row in rows)
    for row in rows:
        assert row["replicas"]
        assert {replica["digest"] for replica in row["replicas"]} == {row["digest"]}
    assert (summary["samples_lost"], summary["samples"]) == (0, 16 * len(rows))
    assert summary["versions"] == summary["versions_verified"] == len(rows)


async def _ready(stub: trainer_pb2_grpc.TrainerServiceStub, replicas: Sequence[Process]) -> None:
    async with asyncio.timeout(START_SECONDS):
        while True:
            status = await stub.GetStatus(trainer_pb2.GetStatusRequest(), timeout=SECONDS)
            states = [replica.state for replica in status.replicas]
            if states == [trainer_pb2.REPLICA_STATE_READY] * len(replicas):
                return
            await asyncio.sleep(0.05)


async def _kill_during_receive(replica: Process, proxy: Proxy) -> None:
    proxy.bytes_per_second, begun_bytes = 20e3, proxy.passed_bytes
    await eventually(lambda: proxy.passed_bytes > begun_bytes + 20_000, seconds=SECONDS)
    await _kill(replica)


async def _kill_during_commit(replica: Process, staging: Path) -> None:
    """Within the tenth of a second after an update's directory has appeared."""
    known = set(staging.glob("*/*/*"))
    await eventually(lambda: set(staging.glob("*/*/*")) - known, seconds=SECONDS)
    await asyncio.sleep(random.uniform(0, 0.1))
    await _kill(replica)


async def _kill_during_generation(
    replica: Process, stub: trainer_pb2_grpc.TrainerServiceStub
) -> None:
    async with asyncio.timeout(SECONDS):
        while True:
            status = await stub.GetStatus(trainer_pb2.GetStatusRequest(), timeout=SECONDS)
            if any(r.address == replica.address and r.outstanding for r in status.replicas):
                break
    await _kill(replica)


async def _kill(replica: Process) -> None:
    """faults.md 27, vllm#42207: its engine's processes, and the memory they hold, go with it."""
    children = psutil.Process(replica.process.pid).children(recursive=True)
    assert len(children) >= 2
    await replica.kill()
    await eventually(lambda: not any(map(_lives, children)), seconds=SECONDS)


def _lives(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def _rows(root: Path) -> list[dict[str, Any]]:
    path = root / "run/metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _trainer_arguments(model: Path, root: Path) -> list[str]:
    file = root / "trainer.toml"
    file.write_text(f"""
model = "{model}"
run_dir = "{root}/run"
serve_after_run = true
megatron.dtype = "float32"
lora.rank = 8
train.lr = 3e-3
rl.data = "trainer_svc.demo.fast_task:prompts"
rl.reward = "trainer_svc.demo.fast_task:reward"
rl.steps = 1000
rl.prompts_per_step = 4
rl.group_size = 4
rl.max_tokens = 24
server.port = 0
server.heartbeat_seconds = 1
server.lease_seconds = 5
""")
    return ["trainer", "--config", str(file)]


def _rollout_arguments(model: Path, staging: Path, trainer: str) -> list[str]:
    file = staging.with_suffix(".toml")
    file.write_text(f"""
model = "{model}"
max_lora_rank = 8
staging_dir = "{staging}"
trainer_address = "{trainer}"
engine.dtype = "float32"
engine.max_model_len = 128
engine.max_num_seqs = 16
engine.enforce_eager = true
""")
    return ["rollout", "--config", str(file)]
