"""Megatron ranks with the demo's model and a batch of its shape."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

from trainer_svc.demo import smollm2, tiny
from trainer_svc.megatron.client import MegatronWorker
from trainer_svc.megatron.protocol import Batch, Sample
from trainer_svc.megatron.settings import WorkerSettings

DEADLINE_SECONDS = 600.0


def prepare_model(scratch: Path, *, quick: bool) -> Path:
    """SmolLM2, or a tiny model in `scratch`."""
    return tiny.prepare(scratch / "tiny") if quick else smollm2.prepare(Path("models/smollm2"))


@contextlib.asynccontextmanager
async def ready_worker(model: Path) -> AsyncIterator[MegatronWorker]:
    """One rank that has loaded the model."""
    async with MegatronWorker(num_ranks=1, max_restarts=0) as worker:
        await worker.wait_connected(deadline_seconds=DEADLINE_SECONDS)
        await worker.init(WorkerSettings(model_dir=model), deadline_seconds=DEADLINE_SECONDS)
        yield worker


def demo_batch() -> Batch:
    """The demo's shape: 64 samples of 60 prompt and 16 completion tokens."""
    rng = random.Random(0)
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
