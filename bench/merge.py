"""Adapters summed into the weights, against slots, and against vLLM with and without LoRA."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any, Final, TypeVar

import torch
from transformers import AutoModelForCausalLM

from bench.generating import Ids, Load, PlainVllm, generate
from bench.report import Goal, Report, Row, arguments
from bench.worker import prepare_model
from common.rules import Merge
from rollout_svc.config import RolloutConfig
from rollout_svc.engine import BoundReport, EngineAdapter
from rollout_svc.vllm_engine.engine import VllmEngine
from rollout_svc.vllm_engine.environment import set_engine_defaults
from tests.peft_adapters import merged_model, save_adapter

T = TypeVar("T")

_SEED = 0
_RANK: Final = 16
_ALPHA = 2
_OURS = {"hf_overrides": {"head_dtype": "float32"}, "logprobs_mode": "processed_logprobs"}
"""What the service asks of vLLM, so that the same is computed."""

_OWN = ("merged", "slots")
"""Engines whose update is no part of a request."""

_SCORED = 4
"""Sequences whose log-probabilities are compared."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The model, two adapters of it that take turns, and what is generated.

    `decode` has short prompts, `phase` is the generation of one RL step.
    """

    model: Path
    dtype: str
    adapters: tuple[Path, Path]
    decode: Load
    phase: Load
    with_vllm: bool
    """Whether vLLM's own engines take part; each takes its while to start."""

    @property
    def engine(self) -> dict[str, Any]:
        """vLLM's arguments, the same for all."""
        return {"dtype": self.dtype, "max_model_len": 512, "max_num_seqs": 64}


@dataclass(slots=True)
class Contest:
    """Engines that work by turns, what each piece of work took, and how far they differ."""

    setting: Setting
    merged: VllmEngine
    slots: VllmEngine
    others: Mapping[str, PlainVllm]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    differences: list[float] = field(default_factory=list)

    async def round(self, number: int) -> list[Ids]:
        """Every engine once, with the adapter that it does not hold; what was generated."""
        decode, phase = self.setting.decode, self.setting.phase
        path = self.setting.adapters[number % 2]
        adapter = EngineAdapter(number + 1, f"bench@{number}", path)
        await self._time("merged update", self._merge(path))
        sequences = await self._time("merged phase", generate(self.merged, phase))
        await self._time("merged decode", generate(self.merged, decode))
        await self._time("slots update", self._load(adapter))
        await self._time("slots phase", generate(self.slots, phase, adapter=adapter))
        await self._time("slots decode", generate(self.slots, decode, adapter=adapter))
        for name, vllm in self.others.items():
            await self._time(f"{name} phase", vllm.generate(phase, adapter))
            await self._time(f"{name} decode", vllm.generate(decode, adapter))
        await self._compare(adapter, sequences[:_SCORED])
        await self.slots.unload(adapter.id)
        return sequences[:_SCORED]

    def typical(self, name: str) -> float:
        return median(self.seconds[name])

    def phase(self, name: str) -> list[float]:
        """Seconds of an RL step's generation, with the update before it."""
        seconds = self.seconds[f"{name} phase"]
        updates = self.seconds.get(f"{name} update", [0.0] * len(seconds))
        return [update + rest for update, rest in zip(updates, seconds, strict=True)]

    async def _merge(self, path: Path) -> None:
        _check(await self.merged.merge(path, base=self.setting.model))

    async def _load(self, adapter: EngineAdapter) -> None:
        _check(await self.slots.load(adapter))

    async def _compare(self, adapter: EngineAdapter, sequences: list[Ids]) -> None:
        for ids in sequences:
            pair = await self.merged.score(None, ids), await self.slots.score(adapter, ids)
            self.differences += [abs(a - b) for a, b in zip(*pair, strict=True)]

    async def _time(self, name: str, work: Awaitable[T]) -> T:
        begun = time.perf_counter()
        result = await work
        self.seconds.setdefault(name, []).append(time.perf_counter() - begun)
        return result


def _check(reports: list[BoundReport]) -> None:
    for report in reports:
        assert not report.error and not report.mismatches, report


def main() -> None:
    args = arguments(__doc__)
    set_engine_defaults()
    repeats = 1 if args.quick else 3
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        setting = _setting(Path(scratch), quick=args.quick)
        contest, sequences = asyncio.run(_contest(setting, repeats=repeats))
        # A tiny model's steps are mostly Python.
        goals = [] if args.quick else list(_goals(contest, _noise(setting, repeats, sequences)))
    Report("merge", _SEED, repeats, list(_rows(contest)), goals).publish(args.json)


def _setting(scratch: Path, *, quick: bool) -> Setting:
    model = prepare_model(scratch, quick=quick)
    hugging_face = AutoModelForCausalLM.from_pretrained(model)
    first, second = (
        save_adapter(
            hugging_face, scratch / f"adapter-{seed}", seed=seed, r=_RANK, lora_alpha=_ALPHA
        )
        for seed in (1, 2)
    )
    rng = random.Random(_SEED)
    short, long = ([_ids(rng, length) for _ in range(32)] for length in (16, 60))
    return Setting(
        model,
        "float32" if quick else "bfloat16",
        (first, second),
        decode=Load(short, n=1, length=8 if quick else 64),
        phase=Load(long[:8], n=8, length=8 if quick else 64),
        with_vllm=not quick,
    )


def _ids(rng: random.Random, length: int) -> Ids:
    return tuple(rng.randrange(256) for _ in range(length))


async def _contest(setting: Setting, *, repeats: int) -> tuple[Contest, list[Ids]]:
    """Rounds after one that does not count, and the sequences of the last."""
    config = RolloutConfig(
        model=setting.model, max_loras=2, max_lora_rank=_RANK, engine=setting.engine
    )
    slotless = config.model_copy(update={"max_loras": 0, "merge": Merge.ROLLOUT})
    lora = {"enable_lora": True, "max_loras": config.max_loras, "max_lora_rank": _RANK}
    others: dict[str, dict[str, Any]] = {}
    if setting.with_vllm:
        others = {"vLLM": {}, "vLLM slots": lora}
    ours = asyncio.gather(VllmEngine.start(slotless), VllmEngine.start(config))
    plain = await asyncio.gather(
        *(
            asyncio.to_thread(PlainVllm, setting.model, **setting.engine, **_OURS, **more)
            for more in others.values()
        )
    )
    merged, slots = await ours
    contest = Contest(setting, merged, slots, dict(zip(others, plain, strict=True)))
    try:
        for number in range(repeats + 1):
            sequences = await contest.round(number)
            if number == 0:
                contest.seconds.clear()
                contest.differences.clear()
    finally:
        for vllm in plain:
            vllm.llm.shutdown()
        for engine in (merged, slots):
            engine.shutdown()
    return contest, sequences


@torch.no_grad()
def _noise(setting: Setting, number: int, sequences: list[Ids]) -> float:
    """What Hugging Face's log-probabilities differ by on average, computed in bf16 and in fp32."""
    tables = []
    for dtype in (torch.float32, torch.bfloat16):
        base = AutoModelForCausalLM.from_pretrained(setting.model, dtype=dtype)
        model = merged_model(base, setting.adapters[number % 2])
        rows = [model(torch.tensor([ids])).logits[0, :-1].float() for ids in sequences]
        tables.append(
            torch.cat(
                [
                    row.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])
                    for row, ids in zip(rows, sequences, strict=True)
                ]
            )
        )
    return (tables[0] - tables[1]).abs().mean().item()


def _rows(contest: Contest) -> Iterator[Row]:
    for name in (*_OWN, *contest.others):
        yield {
            "engine": name,
            "decode, tokens/s": contest.setting.decode.tokens / contest.typical(f"{name} decode"),
            "update, s": contest.typical(f"{name} update") if name in _OWN else "",
            "RL step, s": median(contest.phase(name)),
        }


def _goals(contest: Contest, noise: float) -> Iterator[Goal]:
    decode = contest.seconds["merged decode"]
    yield Goal(
        "merged over vLLM, seconds", _ratio(decode, contest.seconds["vLLM decode"]), 1 / 0.95
    )
    yield Goal(
        "merge and generate over vLLM's slots, seconds",
        _ratio(contest.phase("merged"), contest.phase("vLLM slots")),
        0.5,
    )
    yield Goal("one merge, s", contest.typical("merged update"), 0.5)
    # Each of the two may be as far from exact as Hugging Face's own bf16 is.
    yield Goal("log-probabilities, merged to slots", mean(contest.differences), 2 * noise)


def _ratio(one: list[float], other: list[float]) -> float:
    return median(a / b for a, b in zip(one, other, strict=True))


if __name__ == "__main__":
    main()
