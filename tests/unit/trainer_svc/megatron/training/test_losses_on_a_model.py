"""Loss functions in a whole step of a tiny model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from trainer_svc.megatron.engine import MegatronTrainer
from trainer_svc.megatron.protocol import Batch
from trainer_svc.megatron.settings import WorkerSettings
from trainer_svc.megatron.training.settings import SftSettings

pytestmark = pytest.mark.usefixtures("ranks")


def trainer(settings: WorkerSettings, **train: Any) -> MegatronTrainer:
    own = settings.train.model_copy(update=train)
    return MegatronTrainer(settings.model_copy(update={"train": own}))


def fresh(batch: Batch, found: MegatronTrainer) -> Batch:
    """As a rollout of the trainer's own arithmetic would have made it."""
    pairs = zip(batch.samples, found.logprobs(batch), strict=True)
    return replace(batch, samples=tuple(replace(s, rollout_logprobs=tuple(lp)) for s, lp in pairs))


def test_on_policy_every_policy_loss_is_one_policy_gradient(
    settings: WorkerSettings, batch: Batch
) -> None:
    """Ratios are 1 and nothing is clipped, whatever the kind of ratio."""
    norms = []
    for loss in ("grpo", "ppo", "gspo", "cispo", "reinforce"):
        found = trainer(settings, loss=loss, aggregation="sample_mean")
        norms.append(found.step(fresh(batch, found))["grad_norm"])
    assert norms == pytest.approx([norms[0]] * 5, rel=1e-5)


def test_the_warm_starts_loss_and_entropy_are_hugging_faces(
    settings: WorkerSettings, batch: Batch
) -> None:
    lessons = replace(
        batch,
        samples=tuple(
            replace(s, advantage=1.0, rollout_logprobs=(0.0,) * len(s.completion_ids))
            for s in batch.samples
        ),
    )
    model = AutoModelForCausalLM.from_pretrained(settings.model_dir, dtype=torch.float32)
    logprobs, entropies = [], []
    for sample in lessons.samples:
        ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
        with torch.no_grad():
            every = torch.log_softmax(model(ids).logits[0], dim=-1)[len(sample.prompt_ids) - 1 : -1]
        logprobs.append(every.gather(1, torch.tensor(sample.completion_ids)[:, None]))
        entropies.append(-(every.exp() * every).sum(dim=1))
    found = trainer(settings, **SftSettings().apply(settings.train).model_dump())
    steps = [found.step(lessons) for _ in range(5)]
    assert steps[0]["loss"] == pytest.approx(-torch.cat(logprobs).mean().item(), abs=1e-5)
    assert steps[0]["entropy"] == pytest.approx(torch.cat(entropies).mean().item(), abs=1e-5)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5


@pytest.mark.parametrize("aggregation", ["sample_mean", "constant"])
def test_micro_batches_change_no_gradient(
    settings: WorkerSettings, batch: Batch, aggregation: str
) -> None:
    """Whatever weighs tokens, it is counted over the whole minibatch."""
    norms = []
    for budget in (1, 10_000):
        found = trainer(
            settings, aggregation=aggregation, max_tokens=20, micro_batch_tokens=budget, loss="gspo"
        )
        norms.append(found.step(fresh(batch, found))["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
