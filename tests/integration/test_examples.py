"""The examples as a user runs them: a training loop, its publisher and a real replica."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from refit.v1 import rollout_pb2, rollout_pb2_grpc

from tests.integration.services import refit
from trainer_svc.demo import tiny

pytestmark = pytest.mark.timeout(180)
ROOT = Path(__file__).parents[2]
STEPS = 3


@dataclass(frozen=True, slots=True)
class Fleet:
    """One replica, which looks for a trainer at `port`."""

    model: Path
    port: int
    replica: str

    def held(self) -> dict[int, str]:
        """Digest of every version that the replica serves."""
        with grpc.insecure_channel(self.replica) as channel:
            stub = rollout_pb2_grpc.RolloutServiceStub(channel)
            found = stub.ListAdapters(rollout_pb2.RolloutServiceListAdaptersRequest(), timeout=10)
        return {ref.version: ref.digest.hex() for ref in found.adapters}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("examples")
    model = tiny.prepare(root / "tiny")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings: dict[str, object] = {
        "model": model,
        "trainer_address": f"127.0.0.1:{port}",
        "max_lora_rank": 8,
        "staging_dir": root / "staging",
        "engine.dtype": "float32",
        "engine.max_model_len": 128,
        "engine.max_num_seqs": 16,
        "engine.enforce_eager": True,
    }
    with refit("rollout", settings=settings, log=root / "rollout.log") as (_, replica):
        yield Fleet(model, port, replica)


@pytest.mark.parametrize("example", ["peft_loop", "trl_grpo"])
def test_every_step_samples_from_the_version_just_published(fleet: Fleet, example: str) -> None:
    """faults.md 1 and 5, verl#7495 and ART#661. The second example is another run to the fleet."""
    arguments = ["--model", str(fleet.model), "--port", str(fleet.port), "--steps", str(STEPS)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{example}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')
    ]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert [row["made_by"] for row in rows] == [[1], [2], [3]]
    assert len({row["digest"] for row in rows}) == STEPS
    assert all(0 <= row["reward"] <= 1 for row in rows)
    assert fleet.held()[STEPS] == rows[-1]["digest"]
