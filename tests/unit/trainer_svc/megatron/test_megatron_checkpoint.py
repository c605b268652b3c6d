"""Checkpoints of two ranks, resumed under every other layout; writes that fail."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from common.errors import CheckpointFailed
from tests.checkpointing import (
    STATE,
    batch_of,
    next_step,
    numbers,
    settings_of,
    stored,
    trained,
)
from tests.ranks import run_ranks
from trainer_svc.megatron.checkpoint import load_checkpoint, save_checkpoint
from trainer_svc.megatron.engine import MegatronTrainer

pytestmark = [pytest.mark.usefixtures("ranks"), pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Job:
    """What two ranks do: train and save under `layouts[0]`, resume under each of them."""

    model: str
    layouts: tuple[str, ...]
    lora: dict[str, Any]

    def trainer(self, root: Path, *, layout: str) -> MegatronTrainer:
        return MegatronTrainer(settings_of(root / self.model, layout=layout, **self.lora))


JOBS = {
    "dense": Job("llama", ("tp2", "pp2", "vpp2", "dp2"), {}),
    "experts": Job("qwen3_moe", ("ep2", "tp2", "etp2", "pp2", "dp2"), {}),
    "shared_by_experts": Job(
        "qwen3_moe",
        ("tp2", "ep2", "pp2"),
        {"experts": "shared", "target_modules": ["linear_fc*"], "type": "canonical_lora"},
    ),
}


def two_ranks(dirs: tuple[Path, Path]) -> None:
    """All that needs two ranks; what each saw is in its JSON file."""
    (models, root), rank = dirs, dist.get_rank()
    found = {name: save_and_resume(job, models, root / name) for name, job in JOBS.items()}
    failures = save_with_failures(JOBS["dense"].trainer(models, layout="tp2"), root, rank=rank)
    (root / f"rank_{rank}.json").write_text(json.dumps({"jobs": found, "failures": failures}))


def save_and_resume(job: Job, models: Path, root: Path) -> dict[str, Any]:
    """Metrics of the step after, by how it was come to."""
    trainer = trained(job.trainer(models, layout=job.layouts[0]))
    save_checkpoint(trainer, root / "saved", state=STATE)
    found = {"uninterrupted": next_step(trainer, root / "uninterrupted")}
    for layout in job.layouts:
        found[layout] = resume(job.trainer(models, layout=layout), root, layout)
    return found


def resume(trainer: MegatronTrainer, root: Path, layout: str) -> dict[str, float]:
    assert load_checkpoint(trainer, root / "saved") == STATE
    assert trainer.policies.names == ("default", "old", "reference")
    save_checkpoint(trainer, root / f"saved_{layout}", state=STATE)
    return next_step(trainer, root / layout)


def save_with_failures(trainer: MegatronTrainer, root: Path, *, rank: int) -> dict[str, Any]:
    good = root / "shared" / "last"
    trainer.step(batch_of(0))
    save_checkpoint(trainer, good, state={"step": 1})
    trainer.step(batch_of(1))
    found: dict[str, Any] = {}
    for failing in (0, 1):
        with file_size_limit(2000 if rank == failing else resource.RLIM_INFINITY):
            found[f"full on {failing}"] = fail_to_save(trainer, good)
    elsewhere = root / "elsewhere" / "last"
    found["not shared"] = fail_to_save(trainer, good if rank == 0 else elsewhere)
    found["state"] = load_checkpoint(trainer, good)
    found["step"] = numbers(trainer.step(batch_of(1)))
    save_checkpoint(trainer, good, state={"step": 3})
    return found


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond it: to it, the file system is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fail_to_save(trainer: MegatronTrainer, path: Path) -> dict[str, Any]:
    """The error that this rank sees, and how long it took."""
    started = time.monotonic()
    with pytest.raises(CheckpointFailed) as caught:
        save_checkpoint(trainer, path, state={"step": 2})
    return {"error": str(caught.value), "seconds": time.monotonic() - started}


@dataclass(frozen=True)
class Outcome:
    """What the two ranks left on disk and saw."""

    root: Path
    ranks: tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def outcome(model_dirs: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    root = tmp_path_factory.mktemp("two_ranks")
    dirs = (model_dirs, root)
    run_ranks(two_ranks, dirs, num_ranks=2, store=root / "store", deadline_seconds=250)
    first, second = (json.loads((root / f"rank_{rank}.json").read_text()) for rank in range(2))
    return Outcome(root, (first, second))


@pytest.mark.parametrize("name", JOBS)
def test_a_run_goes_on_under_any_layout(outcome: Outcome, model_dirs: Path, name: str) -> None:
    job, root = JOBS[name], outcome.root / name
    found = outcome.ranks[0]["jobs"][name]
    assert outcome.ranks[1]["jobs"][name] == found
    found["one"] = resume(job.trainer(model_dirs, layout="dp2"), root, "one")
    saved = stored(root / "saved")
    assert {key.partition(".")[0] for key in saved} == {"default", "old"}
    after = load_file(root / "uninterrupted" / "adapter_model.safetensors")
    for layout in (*job.layouts, "one"):
        again = stored(root / f"saved_{layout}")
        assert again.keys() == saved.keys()
        assert all(torch.equal(again[key], saved[key]) for key in saved), layout
        assert found[layout] == pytest.approx(found["uninterrupted"], rel=1e-5, abs=1e-6)
        tensors = load_file(root / layout / "adapter_model.safetensors")
        assert tensors.keys() == after.keys()
        for key, tensor in tensors.items():
            torch.testing.assert_close(tensor, after[key], atol=1e-6, rtol=0)
    assert found[job.layouts[0]] == found["uninterrupted"]


def test_a_write_that_fails_on_any_rank_fails_on_all_and_keeps_the_last_good_one(
    outcome: Outcome, model_dirs: Path
) -> None:
    """faults.md 23, TRL#6797: nobody waits at a barrier for a rank that gave up."""
    first, second = (seen["failures"] for seen in outcome.ranks)
    for case, message in (
        ("full on 0", "could not be written (File too large); the one before is kept"),
        ("full on 1", "checkpoint: rank 1 failed at "),
        ("not shared", "checkpoint: rank 1 does not see "),
    ):
        assert message in first[case]["error"]
        assert first[case]["error"] == second[case]["error"]
        assert max(first[case]["seconds"], second[case]["seconds"]) < 10
    assert first["state"] == second["state"] == {"step": 1}
    assert first["step"] == second["step"]
    assert [path.name for path in (outcome.root / "shared").iterdir()] == ["last"]
    assert not (outcome.root / "elsewhere").exists()
    resumed = MegatronTrainer(settings_of(model_dirs / "llama"))
    assert load_checkpoint(resumed, outcome.root / "shared" / "last") == {"step": 3}
