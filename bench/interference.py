"""What streaming to four replicas costs a training step, and what a step costs the stream."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median

import uvloop

from bench.fleet_of import Publications, replicas, trainer
from bench.report import Goal, Report, Row, arguments
from bench.shapes import SMOLLM2
from bench.worker import DEADLINE_SECONDS, demo_batch, prepare_model, ready_worker
from common.adapter import Manifest
from trainer_svc.config import ServerSettings
from trainer_svc.megatron.client import MegatronWorker
from trainer_svc.megatron.protocol import Batch

_REPLICAS = 4
_STEP_BOUND, _STREAM_BOUND = 1.05, 1.20


def main() -> None:
    args = arguments(__doc__)
    repeats = 2 if args.quick else 8
    uvloop.install()
    rows, goals = asyncio.run(_measure(quick=args.quick, repeats=repeats))
    Report("interference", 0, repeats, rows, goals).publish(args.json)


async def _measure(*, quick: bool, repeats: int) -> tuple[list[Row], list[Goal]]:
    """By turns: a step alone, a step with an update in its middle, an update alone."""
    batch = demo_batch()
    alone, streamed, idle_updates, busy_updates = [], [], [], []
    versions = [SMOLLM2.filled(seed=seed) for seed in range(2 * repeats + 1)]
    settings = ServerSettings(port=0, delta="never")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        model = prepare_model(Path(scratch), quick=quick)
        async with ready_worker(model) as worker, trainer(settings) as node:
            publications = Publications(node, count=_REPLICAS)
            node.fleet.require(versions[0][0])
            async with replicas(node, _REPLICAS, staging=Path(scratch)):
                await publications.publish(*versions.pop())
                await worker.step(batch, deadline_seconds=DEADLINE_SECONDS)
                for _ in range(repeats):
                    alone.append(await _step_seconds(worker, batch))
                    step = asyncio.ensure_future(_step_seconds(worker, batch))
                    # Until the ranks are at work.
                    await asyncio.sleep(alone[-1] / 4)
                    busy_updates.append(await _update_seconds(publications, *versions.pop()))
                    assert quick or not step.done(), "the update did not fall within the step"
                    streamed.append(await step)
                    idle_updates.append(await _update_seconds(publications, *versions.pop()))
    rows: list[Row] = [
        _row("step", alone, streamed),
        _row("update to 4 replicas", idle_updates, busy_updates),
    ]
    goals = [
        Goal("step with streaming over step alone", float(rows[0]["ratio"]), _STEP_BOUND),
        Goal("update in a step over update alone", float(rows[1]["ratio"]), _STREAM_BOUND),
    ]
    return rows, goals


async def _step_seconds(worker: MegatronWorker, batch: Batch) -> float:
    begun = time.perf_counter()
    await worker.step(batch, deadline_seconds=DEADLINE_SECONDS)
    return time.perf_counter() - begun


async def _update_seconds(
    publications: Publications, manifest: Manifest, buffer: memoryview
) -> float:
    begun = time.perf_counter()
    await publications.publish(manifest, buffer)
    return time.perf_counter() - begun


def _row(what: str, alone: list[float], together: list[float]) -> Row:
    ratios = [both / one for one, both in zip(alone, together, strict=True)]
    return {
        "what": what,
        "alone s": median(alone),
        "together s": median(together),
        "ratio": median(ratios),
        "largest": max(ratios),
    }


if __name__ == "__main__":
    main()
