from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.errors import ConfigError
from trainer_svc.megatron.checkpoint import load_checkpoint, save_checkpoint
from trainer_svc.megatron.engine import MegatronTrainer
from trainer_svc.megatron.lora.layers import trainable_parameters
from trainer_svc.megatron.protocol import Batch
from trainer_svc.megatron.settings import WorkerSettings
from trainer_svc.megatron.training.batching import micro_batches

pytestmark = pytest.mark.usefixtures("ranks")


def changed(settings: WorkerSettings, **parts: Any) -> WorkerSettings:
    """`settings` with some keys of `train`, `lora` or itself replaced."""
    raw = settings.model_dump()
    for key, value in parts.items():
        raw[key] = raw[key] | value if isinstance(value, dict) else value
    return WorkerSettings.model_validate(raw)


def on_policy(trainer: MegatronTrainer, batch: Batch) -> Batch:
    """The batch as a rollout with the trainer's own arithmetic would have reported it."""
    logprobs = trainer.logprobs(batch)
    pairs = zip(batch.samples, logprobs, strict=True)
    return replace(batch, samples=tuple(replace(s, rollout_logprobs=tuple(lp)) for s, lp in pairs))


def total(values: list[float]) -> float:
    return math.fsum(values)


def test_logprobs_are_hugging_faces_in_the_samples_order(
    settings: WorkerSettings, batch: Batch
) -> None:
    """faults.md 18."""
    batch = replace(batch, temperature=0.7)
    found = MegatronTrainer(settings).logprobs(batch)
    model = AutoModelForCausalLM.from_pretrained(settings.model_dir, dtype=torch.float32)
    for sample, values in zip(batch.samples, found, strict=True):
        ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
        with torch.no_grad():
            every = torch.log_softmax(model(ids).logits[0] / 0.7, dim=-1)
        start = len(sample.prompt_ids)
        expected = [
            every[start + i - 1, token].item() for i, token in enumerate(sample.completion_ids)
        ]
        assert values == pytest.approx(expected, abs=1e-5)


def test_updates_raise_what_was_rewarded_and_lower_what_was_not(
    settings: WorkerSettings, batch: Batch
) -> None:
    trainer = MegatronTrainer(settings)
    before = trainer.logprobs(batch)
    for _ in range(5):
        trainer.step(on_policy(trainer, batch))
    after = trainer.logprobs(batch)
    for sample, old, new in zip(batch.samples, before, after, strict=True):
        if sample.advantage:
            assert sample.advantage * (total(new) - total(old)) > 0.5


def test_metrics_of_an_on_policy_step(settings: WorkerSettings, batch: Batch) -> None:
    trainer = MegatronTrainer(settings)
    metrics = trainer.step(on_policy(trainer, batch))
    tokens = sum(len(sample.completion_ids) for sample in batch.samples)
    advantages = sum(s.advantage * len(s.completion_ids) for s in batch.samples)
    assert metrics["tokens"] == tokens == 33
    assert metrics["loss"] == pytest.approx(-advantages / tokens, abs=1e-5)
    assert metrics["tis_weight"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["mismatch"] == pytest.approx(0.0, abs=1e-5)
    assert (metrics["kl"], metrics["clip_fraction"], metrics["skipped_updates"]) == (0, 0, 0)
    assert metrics["lr"] == 0.01
    assert metrics["grad_norm"] > 0


def test_mismatch_is_the_distance_to_the_rollout(settings: WorkerSettings, batch: Batch) -> None:
    trainer = MegatronTrainer(settings)
    exact = on_policy(trainer, batch)
    shifted = replace(
        exact,
        samples=tuple(
            replace(s, rollout_logprobs=tuple(x - 0.1 for x in s.rollout_logprobs))
            for s in exact.samples
        ),
    )
    metrics = trainer.step(shifted)
    assert metrics["mismatch"] == pytest.approx(0.1, abs=1e-5)
    assert metrics["tis_weight"] == pytest.approx(math.exp(0.1), abs=1e-5)
    assert metrics["mismatch_kl"] == pytest.approx(math.exp(0.1) - 1.1, abs=1e-5)


def test_micro_batches_change_nothing_but_the_rounding(
    settings: WorkerSettings, batch: Batch
) -> None:
    trainers = [
        MegatronTrainer(changed(settings, train={"micro_batch_tokens": tokens}))
        for tokens in (1, 10_000)
    ]
    data = on_policy(trainers[0], batch)
    small, whole = (trainer.step(data) for trainer in trainers)
    assert small["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
    assert small["loss"] == pytest.approx(whole["loss"], abs=1e-6)


def test_micro_batches_keep_to_the_budget_and_pad_little(batch: Batch) -> None:
    micros = micro_batches(batch.samples, token_budget=24, device=torch.device("cpu"))
    assert sorted(i for micro in micros for i in micro.order) == list(range(6))
    assert [micro.order for micro in micros] == [(4,), (3, 1), (0,), (5,), (2,)]
    assert all(micro.tokens.numel() <= 24 for micro in micros)
    assert [micro.rewarded for micro in micros] == [True, True, True, False, False]
    assert micros[1].targets.tolist() == [43, 44, 45, 46, 47, 48, 41, 42, 43, 44]
    assert micros[1].positions.tolist() == [4, 5, 6, 7, 8, 9, 2, 3, 4, 5]


def test_the_kl_term_holds_the_policy_near_the_base(settings: WorkerSettings, batch: Batch) -> None:
    distances = []
    for kl_coef in (0.01, 10.0):
        trainer = MegatronTrainer(changed(settings, train={"kl_coef": kl_coef}))
        data = on_policy(trainer, batch)
        history = [trainer.step(data)["kl"] for _ in range(6)]
        assert history[0] == 0.0
        distances.append(history[-1])
    assert 0 < distances[1] < distances[0] / 3


def test_later_minibatches_are_measured_against_the_policy_that_sampled(
    settings: WorkerSettings, batch: Batch
) -> None:
    trainer = MegatronTrainer(changed(settings, train={"minibatches": 3, "lr": 0.1}))
    metrics = trainer.step(on_policy(trainer, batch))
    assert trainer.optimizer.updates == 3
    assert metrics["mismatch"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["clip_fraction"] > 0


def test_dropout_is_no_mismatch(settings: WorkerSettings, batch: Batch) -> None:
    trainer = MegatronTrainer(changed(settings, lora={"dropout": 0.1}))
    trainer.step(batch)
    metrics = trainer.step(on_policy(trainer, batch))
    assert metrics["mismatch"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["tis_weight"] == pytest.approx(1.0, abs=1e-6)
    advantages = sum(s.advantage * len(s.completion_ids) for s in batch.samples)
    assert metrics["loss"] == pytest.approx(-advantages / 33, abs=1e-6)
    assert metrics["clip_fraction"] == 0


def test_a_cap_of_zero_leaves_the_importance_weight_out(
    settings: WorkerSettings, batch: Batch
) -> None:
    metrics = MegatronTrainer(changed(settings, train={"tis_cap": 0})).step(batch)
    assert metrics["tis_weight"] == 1.0
    assert metrics["mismatch"] > 0.1


def test_without_an_advantage_nothing_moves(settings: WorkerSettings, batch: Batch) -> None:
    trainer = MegatronTrainer(settings)
    before = [p.detach().clone() for p in trainable_parameters(trainer.model)]
    flat = replace(batch, samples=tuple(replace(s, advantage=0.0) for s in batch.samples))
    assert trainer.step(flat)["grad_norm"] == 0.0
    after = trainable_parameters(trainer.model)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_gradient_that_is_not_finite_changes_nothing(
    settings: WorkerSettings, batch: Batch
) -> None:
    trainer = MegatronTrainer(settings)
    before = [p.detach().clone() for p in trainable_parameters(trainer.model)]
    broken = replace(batch, samples=tuple(replace(s, advantage=math.inf) for s in batch.samples))
    assert trainer.step(broken)["skipped_updates"] == 1
    after = trainable_parameters(trainer.model)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_gradients_are_clipped_and_the_learning_rate_warms_up(
    settings: WorkerSettings, batch: Batch
) -> None:
    trainer = MegatronTrainer(changed(settings, train={"warmup_updates": 3, "lr": 0.4}))
    assert [trainer.step(batch)["lr"] for _ in range(5)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


def test_a_bfloat16_adapter_follows_float32_masters(settings: WorkerSettings, batch: Batch) -> None:
    """Updates too small for bfloat16 add up in the masters instead of getting lost."""
    small = changed(settings, lora={"dtype": "bfloat16"}, train={"lr": 1e-5})
    trainer = MegatronTrainer(small)
    parameter = trainable_parameters(trainer.model)[0]
    before = parameter.detach().clone()
    for _ in range(3):
        trainer.step(batch)
    state = trainer.optimizer.state_dict()
    drift = state["masters"][0] - before.float()
    assert parameter.dtype is torch.bfloat16
    assert state["masters"][0].dtype is torch.float32
    assert 0 < drift.abs().max() < 1e-4
    assert torch.equal(parameter, state["masters"][0].bfloat16())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_resumes_bit_identically(
    settings: WorkerSettings, batch: Batch, tmp_path: Path, dtype: str
) -> None:
    own = changed(settings, lora={"dtype": dtype, "dropout": 0.3})
    first = MegatronTrainer(own)
    first.step(batch)
    save_checkpoint(first, tmp_path / "step_1", state={"step": 1, "seen": [3, 4]})
    expected = [first.step(batch) for _ in range(2)]

    second = MegatronTrainer(changed(own, seed=99))
    assert load_checkpoint(second, tmp_path / "step_1") == {"step": 1, "seen": [3, 4]}
    found = [second.step(batch) for _ in range(2)]
    for old, new in zip(expected, found, strict=True):
        assert {**new, "seconds": 0} == {**old, "seconds": 0}
    pairs = zip(trainable_parameters(first.model), trainable_parameters(second.model), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_resumed_run_follows_its_own_optimizer_settings(
    settings: WorkerSettings, batch: Batch, tmp_path: Path
) -> None:
    first = MegatronTrainer(settings)
    first.step(batch)
    save_checkpoint(first, tmp_path / "step_1", state={})
    own = {"betas": (0.5, 0.75), "eps": 1e-3, "weight_decay": 0.25}
    second = MegatronTrainer(changed(settings, train=own))
    load_checkpoint(second, tmp_path / "step_1")
    (group,) = second.optimizer.state_dict()["adam"]["param_groups"]
    assert {key: group[key] for key in own} == own


def test_a_checkpoint_replaces_an_older_one_of_its_name(
    settings: WorkerSettings, batch: Batch, tmp_path: Path
) -> None:
    trainer = MegatronTrainer(settings)
    for step in range(2):
        save_checkpoint(trainer, tmp_path / "last", state={"step": step})
    assert load_checkpoint(trainer, tmp_path / "last") == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_no_checkpoint_is_a_config_error(settings: WorkerSettings, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a directory that save made"):
        load_checkpoint(MegatronTrainer(settings), tmp_path)


def test_training_starts_from_an_adapter_directory(
    settings: WorkerSettings, batch: Batch, tmp_path: Path
) -> None:
    trainer = MegatronTrainer(settings)
    trainer.step(batch)
    save_checkpoint(trainer, tmp_path / "one", state={})
    other = MegatronTrainer(changed(settings, adapter_path=tmp_path / "one" / "adapter"))
    assert other.logprobs(batch) == trainer.logprobs(batch)


def test_ranks_that_do_not_divide_are_refused(settings: WorkerSettings) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size: found 2 over 1 ranks"):
        MegatronTrainer(changed(settings, tensor_parallel_size=2))
