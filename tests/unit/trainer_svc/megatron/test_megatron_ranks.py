"""Several ranks over gloo against one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from trainer_svc.megatron.checkpoint import save_checkpoint
from trainer_svc.megatron.engine import MegatronTrainer
from trainer_svc.megatron.protocol import Batch, Json
from trainer_svc.megatron.settings import WorkerSettings


@dataclass(frozen=True)
class Job:
    """What every rank does: start from an adapter, export, measure, update, measure."""

    settings: WorkerSettings
    batch: Batch
    directory: Path
    num_ranks: int


def run_job(rank: int, job: Job) -> None:
    store = job.directory / "store"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=job.num_ranks
    )
    trainer = MegatronTrainer(job.settings)
    trainer.export(job.directory / "flat", base_fingerprint="base")
    before = trainer.logprobs(job.batch)
    metrics = trainer.step(job.batch)
    found = {"before": before, "metrics": metrics, "after": trainer.logprobs(job.batch)}
    (job.directory / f"rank_{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("tensor_parallel_size", [2, 1])
def test_two_ranks_export_the_same_bytes_and_learn_the_same(
    settings: WorkerSettings, batch: Batch, tmp_path: Path, tensor_parallel_size: int
) -> None:
    """faults.md 13, for tensor and for data parallelism."""
    trainer = MegatronTrainer(settings)
    trainer.step(batch)
    save_checkpoint(trainer, tmp_path / "start", state={})
    start = settings.model_copy(update={"adapter_path": tmp_path / "start" / "adapter"})
    one = MegatronTrainer(start)
    one.export(tmp_path / "one", base_fingerprint="base")
    before, metrics, after = one.logprobs(batch), one.step(batch), one.logprobs(batch)

    split = start.model_copy(
        update={"tensor_parallel_size": tensor_parallel_size, "num_threads": 1}
    )
    start_processes(run_job, args=(Job(split, batch, tmp_path, 2),), nprocs=2)  # type: ignore[no-untyped-call]
    assert (tmp_path / "flat").read_bytes() == (tmp_path / "one").read_bytes()
    for rank in range(2):
        found: Json = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        for values, expected in ((found["before"], before), (found["after"], after)):
            for mine, other in zip(values, expected, strict=True):
                assert mine == pytest.approx(other, abs=2e-4)
        for name in ("loss", "grad_norm", "mismatch", "tokens"):
            assert found["metrics"][name] == pytest.approx(metrics[name], rel=1e-4)
