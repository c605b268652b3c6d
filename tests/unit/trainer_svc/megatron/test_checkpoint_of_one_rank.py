"""What a checkpoint brings back, and which it refuses; of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError, Incompatible
from tests.checkpointing import (
    STATE,
    batch_of,
    numbers,
    settings_of,
    stored,
    trained,
)
from trainer_svc.megatron.checkpoint import load_checkpoint, save_checkpoint
from trainer_svc.megatron.engine import MegatronTrainer

pytestmark = [pytest.mark.usefixtures("ranks"), pytest.mark.timeout(300)]


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
