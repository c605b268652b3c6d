from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from common.errors import ConfigError
from trainer_svc.megatron.engine import MegatronTrainer
from trainer_svc.megatron.lora.layers import trained_tensors
from trainer_svc.megatron.protocol import Batch, Sample
from trainer_svc.megatron.settings import WorkerSettings

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


def values(trainer: MegatronTrainer) -> list[Tensor]:
    """A copy of everything that trains."""
    return [t.parameter.detach().clone() for t in trained_tensors(trainer.base.chunks)]


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


def test_the_kl_term_holds_the_policy_near_the_base(settings: WorkerSettings, batch: Batch) -> None:
    distances = []
    for kl_coef in (0.01, 10.0):
        trainer = MegatronTrainer(changed(settings, train={"kl_coef": kl_coef}))
        data = on_policy(trainer, batch)
        history = [trainer.step(data)["kl"] for _ in range(6)]
        assert history[0] == 0.0
        distances.append(history[-1])
    assert 0 < distances[1] < distances[0] / 3


def test_the_kl_term_is_to_the_policy_of_the_settings(
    settings: WorkerSettings, batch: Batch
) -> None:
    """`old` begins as a copy of a policy that B's start makes another than the base."""
    found = {}
    for target in ("reference", "old"):
        trainer = MegatronTrainer(
            changed(settings, lora={"b_init": "normal"}, train={"kl_coef": 0.1, "kl_to": target})
        )
        trainer.policies.add_adapter("old")
        found[target] = [trainer.step(batch)["kl"] for _ in range(2)]
    assert found["old"][0] == pytest.approx(0, abs=1e-9)
    assert found["old"][1] > 1e-6
    assert found["reference"][0] > 1e-3


@pytest.mark.parametrize(("prompt", "completion"), [((96,), (3,)), ((3,), (-1,))])
def test_a_token_outside_the_vocabulary_is_refused(
    settings: WorkerSettings, prompt: tuple[int, ...], completion: tuple[int, ...]
) -> None:
    trainer = MegatronTrainer(settings)
    odd = Batch((Sample(prompt, completion, (-1.0,), 1.0),))
    for act in (trainer.step, trainer.logprobs):
        with pytest.raises(ConfigError, match="outside the model's vocabulary of 96"):
            act(odd)


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
    before = values(trainer)
    flat = replace(batch, samples=tuple(replace(s, advantage=0.0) for s in batch.samples))
    assert trainer.step(flat)["grad_norm"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(values(trainer), before, strict=True))


def test_a_gradient_that_is_not_finite_changes_nothing(
    settings: WorkerSettings, batch: Batch
) -> None:
    trainer = MegatronTrainer(settings)
    before = values(trainer)
    broken = replace(batch, samples=tuple(replace(s, advantage=math.inf) for s in batch.samples))
    assert trainer.step(broken)["skipped_updates"] == 1
    assert all(torch.equal(a, b) for a, b in zip(values(trainer), before, strict=True))


def test_gradients_are_clipped_and_the_learning_rate_warms_up(
    settings: WorkerSettings, batch: Batch
) -> None:
    trainer = MegatronTrainer(changed(settings, train={"warmup_updates": 3, "lr": 0.4}))
    assert [trainer.step(batch)["lr"] for _ in range(5)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


def test_a_bfloat16_adapter_follows_float32_masters(settings: WorkerSettings, batch: Batch) -> None:
    """Updates too small for bfloat16 add up in the masters instead of getting lost."""
    small = changed(settings, lora={"dtype": "bfloat16"}, train={"lr": 1e-5})
    trainer = MegatronTrainer(small)
    before = values(trainer)[0]
    for _ in range(3):
        trainer.step(batch)
    after = values(trainer)[0]
    master = next(iter(trainer.optimizer.masters().values()))
    assert (after.dtype, master.dtype) == (torch.bfloat16, torch.float32)
    assert 0 < (master - before.float()).abs().max() < 1e-4
    assert torch.equal(after, master.bfloat16())


@pytest.mark.parametrize("sequences", ["shared", "packed"])
def test_recomputed_activations_change_nothing(
    settings: WorkerSettings, batch: Batch, sequences: str
) -> None:
    found = []
    for recompute in (False, True):
        own = {"recompute": recompute, "sequences": sequences}
        trainer = MegatronTrainer(changed(settings, train=own, lora={"dropout": 0.3}))
        found.append((trainer.step(batch)["grad_norm"], values(trainer)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    for mine, other in zip(found[1][1], found[0][1], strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: found 2 over 1 ranks"),
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size: found 3 over 1 ranks"),
        ({"virtual_pipeline_size": 2}, "virtual_pipeline_size: found 2 without a pipeline"),
        (
            {"expert_parallel_size": 2},
            "expert_parallel_size . expert_tensor_parallel_size: found 2 over 1 ranks",
        ),
    ],
)
def test_sizes_that_do_not_divide_the_ranks_are_refused_by_key(
    settings: WorkerSettings, sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        MegatronTrainer(changed(settings, parallel=sizes))
