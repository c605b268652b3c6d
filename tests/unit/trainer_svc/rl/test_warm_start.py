"""The warm start over ranks that do as a test says."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from common.errors import WorkerLost
from trainer_svc.megatron.client import MegatronWorker
from trainer_svc.megatron.protocol import Batch, Sample
from trainer_svc.megatron.settings import WorkerSettings
from trainer_svc.megatron.training.settings import SftSettings, TrainSettings
from trainer_svc.rl.warm_start import epochs, warm_start

SAMPLES = [Sample((number,), (9,), (0.0,), 1.0) for number in range(5)]
SETTINGS = WorkerSettings(
    model_dir=Path("m"), train=TrainSettings(loss="gspo", lr=1e-3, warmup_updates=2)
)


@dataclass
class Ranks:
    """Loss 1, 1/2, 1/3, ...; dies in the step with number `dies`."""

    dies: int = 0
    settings: list[WorkerSettings] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    saved: list[tuple[Path, object]] = field(default_factory=list)

    async def init(self, settings: WorkerSettings, *, deadline_seconds: float) -> None:
        self.settings.append(settings)

    async def step(self, batch: Batch, *, deadline_seconds: float) -> dict[str, float]:
        self.batches.append(batch)
        if len(self.batches) == self.dies:
            raise WorkerLost("ranks ended")
        loss = 1 / len(self.batches)
        return {"loss": loss, "lr": 1e-3, "mismatch": 7.0, "tokens": float(len(batch.samples))}

    async def save(self, path: Path, *, state: object, deadline_seconds: float) -> None:
        path.mkdir()
        self.saved.append((path, state))


async def start(ranks: Ranks, directory: Path, **sft: Any) -> Path:
    return await warm_start(
        cast(MegatronWorker, ranks),
        SAMPLES,
        sft=SftSettings(data="x.jsonl", batch_size=2, **sft),
        settings=SETTINGS,
        directory=directory,
        deadline_seconds=5,
    )


async def test_every_epoch_sees_every_sample_once(tmp_path: Path) -> None:
    ranks = Ranks()
    adapter = await start(ranks, tmp_path / "warm", epochs=2, lr=5e-4)

    assert adapter == tmp_path / "warm" / "adapter"
    assert ranks.saved == [(tmp_path / "warm", {"updates": 6})]
    (settings,) = ranks.settings
    assert settings.train == SETTINGS.train.model_copy(
        update={"loss": "cross_entropy", "aggregation": "token_mean", "lr": 5e-4, "tis_cap": 0.0}
    )
    assert settings.model_copy(update={"train": SETTINGS.train}) == SETTINGS
    assert [len(batch.samples) for batch in ranks.batches] == [2, 2, 1, 2, 2, 1]
    seen = [sample.prompt_ids[0] for batch in ranks.batches for sample in batch.samples]
    assert sorted(seen[:5]) == sorted(seen[5:]) == [0, 1, 2, 3, 4]
    assert seen[:5] != seen[5:]
    assert {batch.temperature for batch in ranks.batches} == {1.0}


async def test_a_row_an_update_is_kept(tmp_path: Path) -> None:
    await start(Ranks(), tmp_path / "warm")
    rows = [json.loads(line) for line in (tmp_path / "warm.jsonl").read_text().splitlines()]
    assert rows[0] == {"update": 1, "loss": 1.0, "lr": 1e-3, "tokens": 2.0}
    assert [row["loss"] for row in rows] == [1.0, 1 / 2, 1 / 3]


async def test_a_finished_warm_start_is_used_again(tmp_path: Path) -> None:
    await start(Ranks(), tmp_path / "warm")
    ranks = Ranks()
    assert await start(ranks, tmp_path / "warm") == tmp_path / "warm" / "adapter"
    assert (ranks.settings, ranks.batches, ranks.saved) == ([], [], [])


async def test_one_cut_short_begins_anew(tmp_path: Path) -> None:
    """With fresh ranks, on the same batches."""
    with pytest.raises(WorkerLost):
        await start(Ranks(dies=2), tmp_path / "warm")
    ranks = Ranks()
    await start(ranks, tmp_path / "warm")
    assert ranks.batches == list(
        epochs(SAMPLES, sft=SftSettings(data="x.jsonl", batch_size=2), seed=0)
    )
    assert len((tmp_path / "warm.jsonl").read_text().splitlines()) == 3


def test_the_order_follows_the_seed() -> None:
    sft = SftSettings(data="x.jsonl", batch_size=5)
    first, second = (next(epochs(SAMPLES, sft=sft, seed=seed)) for seed in (0, 1))
    assert first == next(epochs(SAMPLES, sft=sft, seed=0))
    assert first != second
