"""Supervised training before the loop begins."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from trainer_svc.megatron.client import MegatronWorker
from trainer_svc.megatron.protocol import Batch, Sample
from trainer_svc.megatron.settings import WorkerSettings
from trainer_svc.megatron.training.settings import SftSettings
from trainer_svc.run_dir import ADAPTER_DIR

log = logging.getLogger(__name__)

_METRICS = ("loss", "entropy", "grad_norm", "lr", "skipped_updates", "tokens", "seconds")


async def warm_start(
    worker: MegatronWorker,
    samples: Sequence[Sample],
    *,
    sft: SftSettings,
    settings: WorkerSettings,
    directory: Path,
    deadline_seconds: float,
) -> Path:
    """Teach the adapter the samples; where it lies afterwards, as a PEFT directory.

        adapter = await warm_start(worker, samples, sft=sft, settings=settings, ...)
        await worker.init(settings.model_copy(update={"adapter_path": adapter}), ...)

    The ranks are initialised for it and initialised again by the loop, so that this begins with its
    own learning rate, warm-up and moments. The step's cross entropy comes with `settings`; see
    `SftSettings.apply`. One row an update goes to `DIRECTORY.jsonl`.

    Args:
        settings: the loop's.
        directory: a checkpoint is written there at the end. One that is there already is the
            result; what was cut short before begins anew.
        deadline_seconds: of each command.
    """
    adapter = directory / ADAPTER_DIR
    if directory.is_dir():
        log.info("warm start: done before, in %s", directory)
        return adapter
    own = settings.model_copy(update={"train": sft.apply(settings.train)})
    await worker.init(own, deadline_seconds=deadline_seconds)
    batches = list(epochs(samples, sft=sft, seed=settings.seed))
    with directory.with_suffix(".jsonl").open("w") as rows:
        for update, batch in enumerate(batches, 1):
            found = await worker.step(batch, deadline_seconds=deadline_seconds)
            _record(rows, update, found)
            log.info("warm start: update %d of %d: loss %.3f", update, len(batches), found["loss"])
    state = {"updates": len(batches)}
    await worker.save(directory, state=state, deadline_seconds=deadline_seconds)
    return adapter


def _record(rows: IO[str], update: int, found: Mapping[str, float]) -> None:
    row = {"update": update} | {key: found[key] for key in _METRICS if key in found}
    rows.write(json.dumps(row) + "\n")
    rows.flush()


def epochs(samples: Sequence[Sample], *, sft: SftSettings, seed: int) -> Iterator[Batch]:
    """Every sample once an epoch, in an order of its own; an epoch's last batch may be smaller."""
    rng = random.Random(seed)
    for _ in range(sft.epochs):
        order = rng.sample(samples, len(samples))
        for begin in range(0, len(order), sft.batch_size):
            yield Batch(tuple(order[begin : begin + sft.batch_size]))
