"""A trainer and a rollout replica that follows it, and what they are asked."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
from refit.v1 import rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc

from tests.integration.services import START_SECONDS

STEPS = 4


@dataclass(frozen=True, slots=True)
class Pair:
    """A replica that follows a fixed trainer address, and the first run's directory."""

    model: Path
    trainer: str
    rollout: str
    run_dir: Path
    log_dir: Path
    first: subprocess.Popen[str]

    def free_the_port(self) -> None:
        """End the first trainer; others may then listen where the replica looks for one."""
        self.first.terminate()
        self.first.wait(timeout=60)

    def stub(self) -> rollout_pb2_grpc.RolloutServiceStub:
        return rollout_pb2_grpc.RolloutServiceStub(grpc.insecure_channel(self.rollout))

    def settings(self, run_dir: Path, *, steps: int = STEPS) -> dict[str, object]:
        return trainer_settings(self.model, run_dir, steps=steps) | {
            "server.port": int(self.trainer.rpartition(":")[2])
        }


def trainer_settings(model: Path, run_dir: Path, *, steps: int = STEPS) -> dict[str, object]:
    return {
        "model": model,
        "run_dir": run_dir,
        "serve_after_run": True,
        "megatron.dtype": "float32",
        "lora.rank": 8,
        "train.lr": 3e-3,
        "rl.data": "trainer_svc.demo.fast_task:prompts",
        "rl.reward": "trainer_svc.demo.fast_task:reward",
        "rl.steps": steps,
        "rl.prompts_per_step": 2,
        "rl.group_size": 4,
        "rl.max_tokens": 8,
        "rl.checkpoint_every_steps": 2,
        "server.port": 0,
        "server.heartbeat_seconds": 1,
    }


def wait_for_state(trainer: str, state: int) -> trainer_pb2.GetStatusResponse:
    deadline = time.monotonic() + START_SECONDS
    with grpc.insecure_channel(trainer) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        while time.monotonic() < deadline:
            status: trainer_pb2.GetStatusResponse = stub.GetStatus(
                trainer_pb2.GetStatusRequest(), timeout=10, wait_for_ready=True
            )
            if status.state == state:
                return status
            time.sleep(0.1)
    raise AssertionError(f"the run is still in state {status}")


def generate(
    pair: Pair,
    rule: rollout_pb2.VersionRule,
    *,
    adapter: str = "default",
    version: int = 0,
    run_id: str = "",
) -> list[rollout_pb2.GenerateResponse]:
    request = rollout_pb2.GenerateRequest(
        token_ids=rollout_pb2.TokenIds(ids=[5, 6, 7, 8]),
        sampling=rollout_pb2.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
        adapter=rollout_pb2.AdapterSelector(
            adapter=adapter, rule=rule, version=version, run_id=run_id
        ),
    )
    return list(pair.stub().Generate(request, timeout=30))
