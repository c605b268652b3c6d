"""Checkpoints: saved by two ranks, resumed under every other layout; writes that fail."""

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
from megatron.core.dist_checkpointing.serialization import load_plain_tensors
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from common.errors import CheckpointFailed, ConfigError, Incompatible
from tests import tiny_models
from trainer_svc.megatron.checkpoint import load_checkpoint, save_checkpoint
from trainer_svc.megatron.checkpoint_dir import CheckpointDir
from trainer_svc.megatron.engine import MegatronTrainer
from trainer_svc.megatron.protocol import Batch, Sample
from trainer_svc.megatron.settings import WorkerSettings

pytestmark = [pytest.mark.usefixtures("ranks"), pytest.mark.timeout(300)]

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "vpp2": {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2},
    "dp2": {},
    "ep2": {"expert_parallel_size": 2},
    "etp2": {"tensor_parallel_size": 2, "expert_tensor_parallel_size": 2},
}
"""Of two ranks."""

STATE = {"step": 1, "seen": [3, 4], "name": "é"}


def settings_of(model_dir: Path, *, layout: str = "dp2", **lora: Any) -> WorkerSettings:
    return WorkerSettings.model_validate(
        {
            "model_dir": model_dir,
            "dtype": "float32",
            "num_threads": 1,
            "parallel": LAYOUTS[layout],
            "lora": {"rank": 4, "alpha": 8} | lora,
            "train": {"lr": 0.001, "warmup_updates": 3, "micro_batch_tokens": 24},
        }
    )


def batch_of(shift: int) -> Batch:
    return Batch(
        samples=tuple(
            Sample(
                prompt_ids=tuple(range(1 + shift, 4 + shift + i)),
                completion_ids=tuple(range(40 + i, 43 + 2 * i)),
                rollout_logprobs=(-4.5,) * (3 + i),
                advantage=(1.0, -1.0, 0.5)[i % 3],
            )
            for i in range(4)
        )
    )


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    tiny_models.save("llama", root / "llama", num_layers=4)
    tiny_models.save("qwen3_moe", root / "qwen3_moe")
    return root


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


def trained(trainer: MegatronTrainer) -> MegatronTrainer:
    """After two updates, with an adapter `old` on the way from the first to the second."""
    trainer.step(batch_of(0))
    trainer.policies.add_adapter("old")
    trainer.step(batch_of(1))
    trainer.policies.ema_update_adapter("default", "old", decay=0.75)
    return trainer


def numbers(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name != "seconds"}


def next_step(trainer: MegatronTrainer, path: Path) -> dict[str, float]:
    """Metrics of one more step; its adapter lies under `path`."""
    metrics = numbers(trainer.step(batch_of(2)))
    trainer.exporter.to_peft_dir(path)
    return metrics


def two_ranks(rank: int, models: Path, root: Path) -> None:
    """All that needs two ranks; what each saw is in its JSON file."""
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
    found = {name: save_and_resume(job, models, root / name) for name, job in JOBS.items()}
    failures = save_with_failures(JOBS["dense"].trainer(models, layout="tp2"), root, rank=rank)
    (root / f"rank_{rank}.json").write_text(json.dumps({"jobs": found, "failures": failures}))
    dist.destroy_process_group()


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
    start_processes(two_ranks, args=(model_dirs, root), nprocs=2)  # type: ignore[no-untyped-call]
    first, second = (json.loads((root / f"rank_{rank}.json").read_text()) for rank in range(2))
    return Outcome(root, (first, second))


def stored(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    found: dict[str, Tensor] = load_plain_tensors(str(path / "state"))
    return {key: value for key, value in found.items() if isinstance(value, Tensor)}


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


@pytest.fixture
def saved(model_dirs: Path, tmp_path: Path) -> Path:
    """A checkpoint of one rank."""
    trainer = trained(MegatronTrainer(settings_of(model_dirs / "llama")))
    save_checkpoint(trainer, tmp_path / "saved", state=STATE)
    return tmp_path / "saved"


def test_random_numbers_go_on_under_the_same_layout(model_dirs: Path, tmp_path: Path) -> None:
    settings = settings_of(model_dirs / "llama", dropout=0.3)
    trainer = trained(MegatronTrainer(settings))
    save_checkpoint(trainer, tmp_path / "saved", state={})
    expected = numbers(trainer.step(batch_of(2)))
    other_seed = MegatronTrainer(settings.model_copy(update={"seed": 99}))
    load_checkpoint(other_seed, tmp_path / "saved")
    assert numbers(other_seed.step(batch_of(2))) == expected


def test_random_numbers_start_anew_alike_under_another_layout(
    model_dirs: Path, tmp_path: Path
) -> None:
    settings = settings_of(model_dirs / "llama", dropout=0.3)
    save_checkpoint(trained(MegatronTrainer(settings)), tmp_path / "saved", state={})
    # One rank lays itself out alike either way; only what it calls its layout differs.
    sequence = settings.parallel.model_copy(update={"sequence_parallel": True})
    found: list[dict[str, float]] = []
    for parallel in (sequence, sequence, settings.parallel):
        trainer = MegatronTrainer(settings.model_copy(update={"parallel": parallel}))
        torch.rand(len(found))
        load_checkpoint(trainer, tmp_path / "saved")
        found.append(numbers(trainer.step(batch_of(2))))
    assert found[0] == found[1] != found[2]


def test_a_bfloat16_adapter_resumes_from_its_float32_masters(
    model_dirs: Path, tmp_path: Path
) -> None:
    settings = settings_of(model_dirs / "llama", dtype="bfloat16")
    first = trained(MegatronTrainer(settings))
    save_checkpoint(first, tmp_path / "saved", state={})
    assert {value.dtype for value in stored(tmp_path / "saved").values()} == {torch.float32}
    second = MegatronTrainer(settings)
    load_checkpoint(second, tmp_path / "saved")
    for adapter in ("default", "old"):
        masters = second.policies.masters(adapter)
        for name, value in first.policies.masters(adapter).items():
            assert not torch.equal(value, value.bfloat16().float()) or "lora_b" in name
            assert torch.equal(masters[name], value)
    assert numbers(second.step(batch_of(2))) == numbers(first.step(batch_of(2)))


def test_an_adapter_that_the_checkpoint_lacks_starts_as_the_trained_one(
    model_dirs: Path, saved: Path, tmp_path: Path
) -> None:
    plain = MegatronTrainer(settings_of(model_dirs / "llama"))
    plain.step(batch_of(0))
    save_checkpoint(plain, tmp_path / "plain", state={})
    trainer = MegatronTrainer(settings_of(model_dirs / "llama"))
    load_checkpoint(trainer, saved)
    load_checkpoint(trainer, tmp_path / "plain")
    for name, value in plain.policies.masters("default").items():
        assert torch.equal(trainer.policies.masters("old")[name], value)


def test_a_resumed_run_follows_its_own_optimizer_settings(model_dirs: Path, saved: Path) -> None:
    settings = settings_of(model_dirs / "llama")
    slow = settings.model_copy(update={"train": settings.train.model_copy(update={"lr": 4e-6})})
    trainer = MegatronTrainer(slow)
    load_checkpoint(trainer, saved)
    assert trainer.optimizer.updates == 2
    assert trainer.step(batch_of(2))["lr"] == pytest.approx(3e-6)


def test_a_checkpoint_replaces_an_older_one_of_its_name(model_dirs: Path, tmp_path: Path) -> None:
    trainer = MegatronTrainer(settings_of(model_dirs / "llama"))
    for step in range(2):
        save_checkpoint(trainer, tmp_path / "last", state={"step": step})
    assert load_checkpoint(trainer, tmp_path / "last") == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_training_starts_from_a_checkpoints_adapter(model_dirs: Path, saved: Path) -> None:
    settings = settings_of(model_dirs / "llama")
    trainer = MegatronTrainer(settings)
    load_checkpoint(trainer, saved)
    start = settings.model_copy(update={"adapter_path": saved / "adapter"})
    other = MegatronTrainer(start)
    assert other.optimizer.updates == 0
    assert other.logprobs(batch_of(0)) == trainer.logprobs(batch_of(0))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 8}, r"lora_a.* has shape \(4, 64\) in .*, and \(8, 64\) .* set lora.rank"),
        ({"alpha": 4}, r"linear_qkv.0 has scale 2.0 in .*, and 1.0 by .* set lora.alpha"),
        ({"use_rslora": True}, r"scale 2.0 in .*, and 4.0 by .* lora.use_rslora"),
        ({"type": "dora"}, r"lacks default.*magnitude.* \(64 tensors differ\); set lora.type"),
        (
            {"target_modules": ["linear_qkv"]},
            r"has the unknown default.* \(96 tensors differ\); .* lora.target_modules",
        ),
    ],
    ids=["rank", "alpha", "rslora", "type", "targets"],
)
def test_another_adapter_is_refused_by_field(
    model_dirs: Path, saved: Path, lora: dict[str, Any], message: str
) -> None:
    trainer = MegatronTrainer(settings_of(model_dirs / "llama", **lora))
    with pytest.raises(Incompatible, match=message):
        load_checkpoint(trainer, saved)


def test_no_checkpoint_is_a_config_error(model_dirs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a directory that save made"):
        load_checkpoint(MegatronTrainer(settings_of(model_dirs / "llama")), tmp_path)


@pytest.mark.parametrize(
    "name", ["metadata.json", "common.pt", ".metadata", "__0_0.distcp"], ids=str
)
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_checkpoint_is_a_config_error_and_changes_nothing(
    model_dirs: Path, saved: Path, name: str, damage: str
) -> None:
    file = saved / "state" / name
    content = file.read_bytes()
    file.unlink()
    if damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    trainer = MegatronTrainer(settings_of(model_dirs / "llama"))
    before = {k: v.clone() for k, v in trainer.policies.masters("default").items()}
    with pytest.raises(ConfigError, match=r"^checkpoint: .*takes the one before"):
        load_checkpoint(trainer, saved)
    after = trainer.policies.masters("default")
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert trainer.optimizer.updates == 0


def write(directory: CheckpointDir, text: str) -> None:
    directory.begin()
    (directory.partial / "file").write_text(text)


def test_a_publish_that_broke_half_way_is_undone(tmp_path: Path) -> None:
    directory = CheckpointDir(tmp_path / "runs" / "last")
    write(directory, "one")
    directory.publish()
    write(directory, "two")
    # A power cut between the two renames.
    directory.path.rename(tmp_path / "runs" / ".last.old")
    again = CheckpointDir(tmp_path / "runs" / "last")
    again.recover()
    assert (again.path / "file").read_text() == "one"
    write(again, "three")
    again.publish()
    assert (again.path / "file").read_text() == "three"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["last"]


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    directory = CheckpointDir(tmp_path / "file" / "last")
    with pytest.raises(CheckpointFailed, match=r"file/last could not be written \(Not a directory"):
        directory.begin()
