"""What updates cost running requests: throughput, and the gaps between a request's tokens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import torch
import uvloop
from refit.v1 import rollout_pb2_grpc
from transformers import AutoConfig

from bench.report import Goal, Report, Row, arguments
from bench.shapes import Shape, dense
from bench.steady_load import SteadyLoad
from bench.worker import prepare_model
from common.grpc_server import connect
from common.tasks import cancel
from tests.integration.services import refit
from trainer_svc.config import ServerSettings
from trainer_svc.library.publisher import AdapterPublisher
from trainer_svc.rules import SwapName

_RANK = 16
_WIDTH = 16
_MAX_TOKENS = 48
_SLOWDOWN_BOUND, _STEPS_BOUND = 1.03, 3.0
_SWAPS: tuple[SwapName, ...] = ("finish", "abort", "continue")


@dataclass(frozen=True, slots=True)
class Plan:
    """Windows without and with updates take turns, `pairs` of them, and one without at the end."""

    swap: SwapName
    pairs: int
    updates: int
    period_seconds: float

    @property
    def window_seconds(self) -> float:
        return self.updates * self.period_seconds


@dataclass(slots=True)
class Windows:
    """What was seen in windows of one kind."""

    tokens_per_second: list[float] = field(default_factory=list)
    gaps_seconds: list[float] = field(default_factory=list)
    update_seconds: list[float] = field(default_factory=list)


def main() -> None:
    args = arguments(__doc__)
    full = [Plan("finish", 6, 4, 5.0), Plan("abort", 1, 4, 5.0), Plan("continue", 1, 4, 5.0)]
    quick = [Plan(swap, 1, 2, 1.0) for swap in _SWAPS]
    uvloop.install()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        model = prepare_model(Path(scratch), quick=args.quick)
        plans = quick if args.quick else full
        rows, goals = _measure(model, plans, scratch=Path(scratch))
    Report("swap", 0, plans[0].pairs, rows, goals).publish(args.json)


def _measure(model: Path, plans: list[Plan], *, scratch: Path) -> tuple[list[Row], list[Goal]]:
    config = AutoConfig.from_pretrained(model)
    with AdapterPublisher(model, port=0, server=ServerSettings(delta="never")) as publisher:
        settings = {
            "model": model,
            "trainer_address": publisher.address,
            "staging_dir": scratch / "staging",
            "max_lora_rank": _RANK,
            "max_loras": 6,
            "engine.max_model_len": 256,
            "engine.dtype": str(config.dtype).removeprefix("torch."),
        }
        updates = Updates(publisher, config)
        first = updates.publish("finish")
        with refit("rollout", settings=settings, log=scratch / "rollout.log") as (_, address):
            publisher.wait(first)
            return asyncio.run(_run(plans, updates, address, vocab_size=config.vocab_size))


async def _run(
    plans: list[Plan], updates: Updates, address: str, *, vocab_size: int
) -> tuple[list[Row], list[Goal]]:
    rows: list[Row] = []
    goals: list[Goal] = []
    async with connect(address) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        for plan in plans:
            load = SteadyLoad(stub, _WIDTH, _MAX_TOKENS, vocab_size)
            running = asyncio.create_task(load.keep_up())
            plain, updated = await _take_turns(plan, load, updates, running)
            await cancel(running)
            rows += _rows(plan, plain, updated)
            failed = f"failed of {load.finished} requests, {plan.swap}"
            goals.append(Goal(failed, float(load.failed), 0.0))
            if plan.swap == "finish":
                goals += _goals(plain, updated)
    return rows, goals


async def _take_turns(
    plan: Plan, load: SteadyLoad, updates: Updates, running: asyncio.Task[None]
) -> tuple[Windows, Windows]:
    kinds = Windows(), Windows()
    await load.turnover()
    for number in range(2 * plan.pairs + 1):
        windows = kinds[number % 2]
        async with updates.coming(plan, windows) if number % 2 else contextlib.nullcontext():
            await load.turnover()
            begin = time.perf_counter()
            await asyncio.wait([running], timeout=plan.window_seconds)
            end = time.perf_counter()
        if running.done():
            running.result()
        arrived = list(load.within(begin, end))
        tokens = sum(arrival.tokens for arrival in arrived)
        windows.tokens_per_second.append(tokens / (end - begin))
        windows.gaps_seconds.extend(a.gap_seconds for a in arrived if a.gap_seconds)
    return kinds


class Updates:
    """Random versions of an adapter on every linear."""

    def __init__(self, publisher: AdapterPublisher, config: Any) -> None:
        self._publisher = publisher
        modules = dense(
            config.num_hidden_layers,
            config.hidden_size,
            config.num_key_value_heads * config.head_dim,
            config.intermediate_size,
        )
        self._lora = {
            "r": _RANK,
            "lora_alpha": 2 * _RANK,
            "target_modules": sorted({name.rpartition(".")[2] for name, _, _ in modules}),
        }
        shape = Shape("bench", _RANK, modules)
        self._versions = itertools.cycle([_random(shape, seed, config.dtype) for seed in range(4)])

    def publish(self, swap: SwapName) -> Any:
        return self._publisher.publish(next(self._versions), self._lora, swap=swap)

    @contextlib.asynccontextmanager
    async def coming(self, plan: Plan, windows: Windows) -> AsyncIterator[None]:
        """One a period inside the block; the last is seen through."""
        ended = asyncio.Event()
        task = asyncio.create_task(self._come(plan, windows, ended))
        try:
            yield
        finally:
            ended.set()
            await task

    async def _come(self, plan: Plan, windows: Windows, ended: asyncio.Event) -> None:
        while not ended.is_set():
            begun = time.perf_counter()
            version = await asyncio.to_thread(self.publish, plan.swap)
            await asyncio.to_thread(self._publisher.wait, version)
            took = time.perf_counter() - begun
            windows.update_seconds.append(took)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), plan.period_seconds - took)


def _random(shape: Shape, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        entry.name: (0.02 * torch.randn(entry.shape, generator=generator)).to(dtype)
        for entry in shape.entries()
    }


def _rows(plan: Plan, plain: Windows, updated: Windows) -> list[Row]:
    step = median(plain.gaps_seconds)
    return [
        {
            "swap": plan.swap,
            "updates": updates,
            "tokens/s": median(windows.tokens_per_second),
            "gap p50 ms": median(windows.gaps_seconds) * 1e3,
            "p99": quantiles(windows.gaps_seconds, n=100)[-1] * 1e3,
            "p99.9": quantiles(windows.gaps_seconds, n=1000)[-1] * 1e3,
            "longest": max(windows.gaps_seconds) * 1e3,
            "in steps": max(windows.gaps_seconds) / step,
        }
        for updates, windows in (
            ("none", plain),
            (f"{len(updated.update_seconds)}, {median(updated.update_seconds):.2f} s", updated),
        )
    ]


def _slowdowns(plain: Windows, updated: Windows) -> Iterator[float]:
    """Of each window with updates, against those before and after it."""
    for around, found in zip(
        itertools.pairwise(plain.tokens_per_second), updated.tokens_per_second, strict=True
    ):
        yield mean(around) / found


def _goals(plain: Windows, updated: Windows) -> list[Goal]:
    longest = max(updated.gaps_seconds) / median(plain.gaps_seconds)
    return [
        Goal(
            "tokens/s alone over with updates",
            median(_slowdowns(plain, updated)),
            _SLOWDOWN_BOUND,
        ),
        Goal("longest gap between tokens, steps", longest, _STEPS_BOUND),
    ]


if __name__ == "__main__":
    main()
