"""Bytes on the wire for real GRPO steps, as deltas, against the raw PEFT file."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.report import Goal, Report, Row, arguments
from common.model_dir import base_model
from common.peft_dir import read_peft_dir
from trainer_svc.demo import smollm2, tiny
from trainer_svc.demo.process import Service

_LISTENING = r"(?:trainer|rollout) listening on (\S+)"
_START_SECONDS = 300.0
_TASK = {
    "rl.prompts_per_step": "8",
    "rl.group_size": "8",
    "rl.max_tokens": "16",
    "lora.a_init": "kaiming",
    "adapter_dtype": "bfloat16",
    "server.port": "0",
    "server.delta": "always",
}
_BOUNDS = {"1e-5": 0.35, "1e-4": 0.40}
"""Of the raw PEFT file's bytes, by learning rate."""


@dataclass(frozen=True, slots=True)
class Run:
    """The steps of one run, and two sizes of its adapter, in bytes."""

    lr: str
    wire_bytes: list[int]
    peft_bytes: int
    flat_bytes: int

    def rows(self) -> Iterator[Row]:
        for step, wire_bytes in enumerate(self.wire_bytes, 1):
            yield {
                "lr": self.lr,
                "step": float(step),
                "wire MB": wire_bytes / 1e6,
                "of the PEFT file": wire_bytes / self.peft_bytes,
                "of the flat buffer": wire_bytes / self.flat_bytes,
            }

    def goals(self) -> Iterator[Goal]:
        worst = max(self.wire_bytes)
        yield Goal(f"lr {self.lr}: of the PEFT file", worst / self.peft_bytes, _BOUNDS[self.lr])
        yield Goal(f"lr {self.lr}: of the flat buffer", worst / self.flat_bytes, 1.01)


def main() -> None:
    args = arguments(__doc__)
    with tempfile.TemporaryDirectory() as scratch:
        if args.quick:
            model, task, steps = tiny.prepare(Path(scratch) / "tiny"), "fast_task", 3
        else:
            model, task, steps = smollm2.prepare(Path("models/smollm2")), "task", 10
        runs = [
            asyncio.run(_run(lr, model, Path(scratch) / lr, task=task, steps=steps))
            for lr in _BOUNDS
        ]
    rows = [row for run in runs for row in run.rows()]
    # A tiny model's few tensors are mostly manifest.
    goals = [] if args.quick else [goal for run in runs for goal in run.goals()]
    for run in runs:
        share = median(run.wire_bytes) / run.peft_bytes
        print(
            f"lr {run.lr}: median {share:.1%}, aliasing alone {run.flat_bytes / run.peft_bytes:.1%}"
        )
    Report("encoding", 0, 1, rows, goals).publish(args.json)


async def _run(lr: str, model: Path, run_dir: Path, *, task: str, steps: int) -> Run:
    """Train with a real replica; what it says of each update."""
    run_dir.mkdir()
    settings = {
        "model": str(model),
        "run_dir": str(run_dir),
        "rl.data": f"trainer_svc.demo.{task}:prompts",
        "rl.reward": f"trainer_svc.demo.{task}:reward",
        "rl.steps": str(steps),
    }
    trainer = Service(
        "trainer",
        {**settings, **_TASK, "train.lr": lr},
        log=run_dir / "trainer.log",
        announce=_LISTENING,
    )
    async with trainer:
        address = await trainer.announcement(timeout_seconds=_START_SECONDS)
        rollout = Service(
            "rollout",
            {
                "model": str(model),
                "trainer_address": address,
                "max_lora_rank": "16",
                "engine.max_model_len": "512",
                # vLLM's bf16 arithmetic does not run the tiny model's heads on a CPU.
                "engine.dtype": "float32",
            },
            log=run_dir / "rollout.log",
            announce=_LISTENING,
        )
        async with rollout:
            ends = [asyncio.ensure_future(service.wait()) for service in (trainer, rollout)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return _figures(lr, rows, run_dir / "adapter", model)


def _figures(lr: str, rows: list[dict[str, Any]], adapter: Path, model: Path) -> Run:
    base = base_model(model).fingerprint
    manifest = read_peft_dir(adapter, base_fingerprint=base).manifest
    # The checkpoint holds what is trained, in float32; what was published has half the bytes.
    scale = 2 / manifest.tensors[0].dtype.itemsize
    peft_bytes = round(scale * sum(spec.size_bytes for spec in manifest.tensors))
    flat_bytes = round(scale * manifest.total_bytes)
    return Run(lr, [row["wire_bytes"] for row in rows], peft_bytes, flat_bytes)


if __name__ == "__main__":
    main()
