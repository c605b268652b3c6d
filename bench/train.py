"""Seconds of a training step: Refit's against Hugging Face with PEFT, its ways to pack, export."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

from bench.hugging_face import HuggingFaceTrainer
from bench.report import Goal, Report, Row, arguments
from bench.worker import prepare_model
from trainer_svc.demo.task import prompts
from trainer_svc.megatron.engine import MegatronTrainer
from trainer_svc.megatron.protocol import Batch, Sample
from trainer_svc.megatron.settings import WorkerSettings
from trainer_svc.rl.prompts import PromptEncoder

_SEED = 0
_THREADS = 2
_RANK, _ALPHA, _LR = 16, 32, 3e-4
_DEEP_RANK = 32
_HUGGING_FACE = "Hugging Face + PEFT"

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """Work on one batch by several names; `bounds` are of one's time over another's."""

    name: str
    work: Mapping[str, Work]
    bounds: Mapping[tuple[str, str], float]

    def measure(self, *, repeats: int) -> Timing:
        """Seconds of each, by turns, after one round that does not count."""
        seconds: dict[str, list[float]] = {name: [] for name in self.work}
        for _ in range(repeats + 1):
            for name, work in self.work.items():
                begun = time.perf_counter()
                work()
                seconds[name].append(time.perf_counter() - begun)
        return Timing(self.name, {name: found[1:] for name, found in seconds.items()}, self.bounds)


@dataclass(frozen=True, slots=True)
class Timing:
    """What a case took."""

    name: str
    seconds: Mapping[str, Sequence[float]]
    bounds: Mapping[tuple[str, str], float]

    def rows(self) -> Iterator[Row]:
        first = next(iter(self.seconds))
        for name, found in self.seconds.items():
            yield {
                "batch": self.name,
                "work": name,
                "median s": median(found),
                "of the first": self._ratio(name, first),
            }

    def goals(self) -> Iterator[Goal]:
        for (one, other), bound in self.bounds.items():
            yield Goal(f"{self.name}: {one} over {other}", self._ratio(one, other), bound)

    def _ratio(self, one: str, other: str) -> float:
        return median(a / b for a, b in zip(self.seconds[one], self.seconds[other], strict=True))


def main() -> None:
    args = arguments(__doc__)
    repeats = 1 if args.quick else 5
    torch.set_num_threads(_THREADS)
    with tempfile.TemporaryDirectory() as scratch:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
        cases = _cases(Path(scratch), quick=args.quick)
        timings = [case.measure(repeats=repeats) for case in cases]
        dist.destroy_process_group()
    rows = [row for timing in timings for row in timing.rows()]
    # A tiny model's steps are mostly Python.
    goals = [] if args.quick else [goal for timing in timings for goal in timing.goals()]
    Report("train", _SEED, repeats, rows, goals).publish(args.json)


def _cases(scratch: Path, *, quick: bool) -> Iterator[Case]:
    """One after another, so that no two cases' models are in memory together."""
    dtype = "float32" if quick else "bfloat16"
    model = prepare_model(scratch, quick=quick)
    yield _against_hugging_face(model, dtype=dtype)
    yield _mixed_lengths(model, dtype=dtype)
    yield _shared_prompts(model, dtype=dtype)
    deep = _deep_model(scratch / "deep", quick=quick)
    yield _export(deep, scratch / "adapter", dtype=dtype)


def _against_hugging_face(model: Path, *, dtype: str) -> Case:
    rng = random.Random(_SEED)
    batch = Batch(tuple(_sample(rng, _ids(rng, 32), 32) for _ in range(32)))
    return Case(
        "32 sequences of 32 + 32 tokens",
        {
            _HUGGING_FACE: _hugging_face(model, batch, dtype=dtype),
            "packed": _refit(model, batch, sequences="packed", dtype=dtype),
        },
        {("packed", _HUGGING_FACE): 1.15},
    )


def _mixed_lengths(model: Path, *, dtype: str) -> Case:
    """Completions of 4 to 128 tokens, as many from 4 to 8 as from 64 to 128."""
    rng = random.Random(_SEED)
    samples = [
        _sample(rng, _ids(rng, rng.randint(8, 64)), round(2 ** rng.uniform(2, 7)))
        for _ in range(32)
    ]
    ways = ("padded", "packed")
    return Case(
        "32 sequences of mixed lengths",
        {w: _refit(model, Batch(tuple(samples)), sequences=w, dtype=dtype) for w in ways},
        {("packed", "padded"): 1 / 1.5},
    )


def _shared_prompts(model: Path, *, dtype: str) -> Case:
    rng = random.Random(_SEED)
    encoder = PromptEncoder(model)
    questions = [tuple(encoder.encode(example)) for example in islice(prompts(_SEED), 4)]
    batch = Batch(
        tuple(
            _sample(rng, question, rng.randint(4, 12)) for question in questions for _ in range(8)
        )
    )
    ways = ("padded", "shared")
    return Case(
        "4 of the demo's prompts, 8 completions each",
        {
            _HUGGING_FACE: _hugging_face(model, batch, dtype=dtype),
            **{way: _refit(model, batch, sequences=way, dtype=dtype) for way in ways},
        },
        {("shared", "padded"): 1 / 2.5, ("shared", _HUGGING_FACE): 1 / 2},
    )


def _export(model: Path, path: Path, *, dtype: str) -> Case:
    rng = random.Random(_SEED)
    batch = Batch(tuple(_sample(rng, _ids(rng, 32), 32) for _ in range(32)))
    trainer = _trainer(model, sequences="packed", dtype=dtype, rank=_DEEP_RANK)
    return Case(
        "36 layers, rank 32: 504 tensors",
        {
            "step": lambda: trainer.step(batch),
            "export": lambda: trainer.export(path, base_fingerprint="bench"),
        },
        {("export", "step"): 0.05},
    )


def _deep_model(path: Path, *, quick: bool) -> Path:
    """Random, with Qwen3-8B's layers and SmolLM2's widths."""
    config = Qwen3Config(
        num_hidden_layers=36,
        hidden_size=64 if quick else 576,
        intermediate_size=128 if quick else 1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=32 if quick else 64,
        vocab_size=256 if quick else 49152,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(_SEED)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


def _ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(256) for _ in range(count))


def _sample(rng: random.Random, prompt: tuple[int, ...], length: int) -> Sample:
    return Sample(prompt, _ids(rng, length), (-5.0,) * length, rng.uniform(-1, 1))


def _hugging_face(model: Path, batch: Batch, *, dtype: str) -> Work:
    trainer = HuggingFaceTrainer(
        model, dtype=getattr(torch, dtype), rank=_RANK, alpha=_ALPHA, lr=_LR
    )
    return lambda: trainer.step(batch)


def _refit(model: Path, batch: Batch, *, sequences: str, dtype: str) -> Work:
    trainer = _trainer(model, sequences=sequences, dtype=dtype, rank=_RANK)
    return lambda: trainer.step(batch)


def _trainer(model: Path, *, sequences: str, dtype: str, rank: int) -> MegatronTrainer:
    """One rank that makes a step in one micro-batch, as Hugging Face does here."""
    settings = {
        "model_dir": model,
        "dtype": dtype,
        "num_threads": _THREADS,
        "lora": {"rank": rank, "alpha": _ALPHA},
        "train": {"lr": _LR, "sequences": sequences, "micro_batch_tokens": 1 << 16},
    }
    return MegatronTrainer(WorkerSettings.model_validate(settings))


if __name__ == "__main__":
    main()
