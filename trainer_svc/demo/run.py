"""`refit demo`: both services as processes, a run that learns, and its records."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from watchfiles import awatch

from common.errors import ConfigError, Unavailable
from common.tasks import cancel, first_of, stop_requested
from trainer_svc.demo import plots, smollm2, tiny
from trainer_svc.demo.process import Service
from trainer_svc.demo.progress import Progress
from trainer_svc.demo.row_reader import RowReader

_LISTENING = r"(?:trainer|rollout) listening on (\S+)"
_START_TIMEOUT_SECONDS = 120.0
_TRAINER_LOG = "trainer.log"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a demo trains, and the services' settings, as `--set` takes them."""

    model: Path
    trainer: Mapping[str, str]
    rollout: Mapping[str, str]


def main(*, steps: int | None, fast: bool, out: Path | None) -> int:
    """Run the demo to its end; an earlier demo's records in the same place are replaced.

    Raises:
        ConfigError: `out` holds something that no demo left.
        Unavailable: a service ended before the run did.
    """
    out = out or Path("runs/demo-fast" if fast else "runs/demo")
    _make_room(out)
    plan = _fast_plan() if fast else _plan()
    if steps:
        plan = Plan(plan.model, {**plan.trainer, "rl.steps": str(steps)}, plan.rollout)
    return asyncio.run(_until_stopped(plan, out))


def _make_room(out: Path) -> None:
    if out.exists() and any(out.iterdir()) and not (out / _TRAINER_LOG).is_file():
        raise ConfigError(f"--out: {out} holds other files; choose an empty or a new directory")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)


def _plan() -> Plan:
    print("preparing SmolLM2-135M-Instruct", flush=True)
    return Plan(
        model=smollm2.prepare(Path("models/smollm2")),
        trainer={
            "rl.data": "trainer_svc.demo.task:prompts",
            "rl.reward": "trainer_svc.demo.task:reward",
            "rl.steps": "40",
            "rl.prompts_per_step": "8",
            "rl.group_size": "8",
            "rl.max_tokens": "16",
            "rl.canary_prompts": "2",
            # PEFT's start values, smaller than Xavier's: at this learning rate those collapse to
            # one answer for every question before they have found the right ones.
            "lora.a_init": "kaiming",
        },
        rollout={"max_lora_rank": "16", "engine.max_model_len": "1024"},
    )


def _fast_plan() -> Plan:
    return Plan(
        model=tiny.prepare(Path("models/tiny")),
        trainer={
            "rl.data": "trainer_svc.demo.fast_task:prompts",
            "rl.reward": "trainer_svc.demo.fast_task:reward",
            "rl.steps": "15",
            "rl.prompts_per_step": "8",
            "rl.group_size": "8",
            "rl.max_tokens": "12",
            "rl.canary_prompts": "2",
            "train.lr": "1e-2",
            "lora.rank": "8",
            "lora.alpha": "16",
            "megatron.dtype": "float32",
        },
        rollout={
            "max_lora_rank": "8",
            "engine.max_model_len": "256",
            "engine.dtype": "float32",
        },
    )


async def _until_stopped(plan: Plan, out: Path) -> int:
    """The exit status; 130 when SIGINT or SIGTERM came first. No service outlives this."""
    run = asyncio.ensure_future(_run(plan, out))
    try:
        finished = await first_of(stop_requested(), run)
    finally:
        await cancel(run)
    return _finish(out) if finished else 130


async def _run(plan: Plan, out: Path) -> None:
    """Both services until the trainer is done."""
    settings = {"model": str(plan.model), "run_dir": str(out), "server.port": "0"}
    trainer = Service(
        "trainer", {**settings, **plan.trainer}, log=out / _TRAINER_LOG, announce=_LISTENING
    )
    async with trainer:
        address = await trainer.announcement(timeout_seconds=_START_TIMEOUT_SECONDS)
        settings = {"model": str(plan.model), "trainer_address": address}
        rollout = Service(
            "rollout", {**settings, **plan.rollout}, log=out / "rollout.log", announce=_LISTENING
        )
        async with rollout:
            steps = int(plan.trainer["rl.steps"])
            show = asyncio.ensure_future(_show_progress(out / "metrics.jsonl", steps=steps))
            ends = [asyncio.ensure_future(service.wait()) for service in (trainer, rollout)]
            try:
                await asyncio.wait([*ends, show], return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel(show, *ends)
            if show.done() and not show.cancelled():
                await show
            if rollout.returncode is not None:
                raise Unavailable(rollout.epitaph())
            if trainer.returncode:
                raise Unavailable(trainer.epitaph())


async def _show_progress(metrics: Path, *, steps: int) -> None:
    """Follow the run's records, a row a step, until cancelled."""
    with Progress(total_steps=steps) as progress:
        progress.note("starting the trainer and a rollout, about a minute")
        reader = RowReader(metrics)
        try:
            async for _ in awatch(metrics.parent):
                for row in reader.new_rows():
                    progress.show(row)
        finally:
            for row in reader.new_rows():
                progress.show(row)


def _finish(out: Path) -> int:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    plots.reward_png(rows, out / "reward.png")
    summary = json.loads((out / "summary.json").read_text())
    for key, value in summary.items():
        print(f"{key:20} {value:.4g}" if isinstance(value, float) else f"{key:20} {value}")
    print(f"records in {out}")
    return 0
