"""One rank's share of training: model, adapter, objective and optimizer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from common.adapter import Dtype, Manifest
from trainer_svc.megatron import device, parallel
from trainer_svc.megatron.adapter_io.export import export_to_file
from trainer_svc.megatron.adapter_io.load import load_adapter
from trainer_svc.megatron.lora.layers import adapters_off, add_lora, lora_modules
from trainer_svc.megatron.model.build import build_model
from trainer_svc.megatron.protocol import Batch, Sample
from trainer_svc.megatron.settings import WorkerSettings
from trainer_svc.megatron.training import objective
from trainer_svc.megatron.training.batching import MicroBatch, micro_batches
from trainer_svc.megatron.training.optimizer import AdapterOptimizer, Update
from trainer_svc.megatron.training.policy import METRIC_NAMES, completion_logprobs, token_terms


class MegatronTrainer:
    """The policy under training. Every rank makes one and calls the same methods in step.

        trainer = MegatronTrainer(settings)
        metrics = trainer.step(batch)
        manifest = trainer.export(path, base_fingerprint=fingerprint)

    Raises:
        ConfigError: model directory, targets or parallel sizes do not fit.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        parallel.start(tensor_parallel_size=settings.tensor_parallel_size)
        torch.manual_seed(settings.seed + parallel.dp_rank())
        self.settings = settings
        self.model = build_model(settings.model_dir, dtype=getattr(torch, settings.dtype))
        add_lora(self.model, settings=settings.lora, seed=settings.seed)
        if settings.adapter_path is not None:
            load_adapter(self.model, settings.adapter_path, settings=settings.lora)
        modules = [module for _, _, module in lora_modules(self.model)]
        self.optimizer = AdapterOptimizer(modules, settings=settings.train)

    def logprobs(self, batch: Batch) -> list[list[float]]:
        """Log-probability of every completion token under the current policy, sample by sample."""
        micros = self._micro_batches(batch.samples)
        values = [self._evaluate(micro, temperature=batch.temperature) for micro in micros]
        found = {
            index: part.tolist()
            for micro, value in zip(micros, values, strict=True)
            for index, part in zip(
                micro.order, torch.split(value, list(micro.lengths)), strict=True
            )
        }
        shares = parallel.gather_dp_objects([found[index] for index in sorted(found)])
        return [shares[i % len(shares)][i // len(shares)] for i in range(len(batch.samples))]

    def step(self, batch: Batch) -> dict[str, float]:
        """One policy update, in `minibatches` optimizer updates; its metrics.

        Means over completion tokens: `loss`, `kl` (to the base), `clip_fraction`, `mismatch`
        (absolute difference of trainer's and rollout's log-probabilities), `mismatch_kl` (k3
        estimate of KL(rollout || trainer)) and `tis_weight`. Of the last update: `grad_norm`
        before clipping, and `lr`. Then `skipped_updates`, `tokens` (of completions), `seconds`.
        """
        started = time.perf_counter()
        parts = min(self.settings.train.minibatches, len(batch.samples))
        minibatches = [batch.samples[part::parts] for part in range(parts)]
        micros = [self._micro_batches(minibatch) for minibatch in minibatches]
        sampled = self._sampled(micros, temperature=batch.temperature)
        sums = torch.zeros(len(METRIC_NAMES), dtype=torch.float64, device=device.compute_device())
        updates: list[Update] = []
        for minibatch, ms, values in zip(minibatches, micros, sampled, strict=True):
            backward = partial(
                self._backward,
                on_policy=parts == 1,
                temperature=batch.temperature,
                total_tokens=_completion_tokens(minibatch),
            )
            for micro, value in zip(ms, values, strict=True):
                sums += backward(micro, value)
            updates.append(self.optimizer.step())
        return _metrics(sums, updates, tokens=_completion_tokens(batch.samples)) | {
            "seconds": time.perf_counter() - started
        }

    def export(
        self, path: Path, *, base_fingerprint: str, dtype: Dtype | None = None
    ) -> Manifest | None:
        """Write the adapter's flat buffer as a file; the manifest on rank 0, None elsewhere."""
        return export_to_file(
            self.model,
            path,
            settings=self.settings.lora,
            base_fingerprint=base_fingerprint,
            dtype=dtype,
        )

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """This data-parallel rank's share, in micro-batches."""
        return micro_batches(
            samples[parallel.dp_rank() :: parallel.dp_size()],
            token_budget=self.settings.train.micro_batch_tokens,
            device=device.compute_device(),
        )

    def _sampled(
        self, minibatches: Sequence[Sequence[MicroBatch]], *, temperature: float
    ) -> list[list[Tensor | None]]:
        """Log-probabilities under the policy before the step; None where `_backward` finds them.

        The first of several updates moves the policy, and dropout adds noise to it.
        """
        if len(minibatches) == 1 and self.settings.lora.dropout == 0:
            return [[None] * len(minibatches[0])]
        return [
            [self._evaluate(micro, temperature=temperature) for micro in micros]
            for micros in minibatches
        ]

    @torch.no_grad()
    def _evaluate(self, micro: MicroBatch, *, temperature: float) -> Tensor:
        """Log-probabilities without gradient and without dropout."""
        self.model.eval()
        return completion_logprobs(self.model, micro, temperature=temperature)

    def _backward(
        self,
        micro: MicroBatch,
        sampled: Tensor | None,
        *,
        on_policy: bool,
        temperature: float,
        total_tokens: int,
    ) -> Tensor:
        """Add one micro-batch's gradient; the sums of its metrics."""
        settings = self.settings.train
        reference = None
        if settings.kl_coef > 0:
            with adapters_off(self.model):
                reference = self._evaluate(micro, temperature=temperature)
        learns = micro.rewarded or reference is not None
        self.model.train()
        with torch.set_grad_enabled(learns):
            logprobs = completion_logprobs(self.model, micro, temperature=temperature)
            terms = token_terms(
                micro,
                logprobs,
                sampled=sampled,
                on_policy=on_policy,
                reference=reference,
                settings=settings,
            )
            if learns:
                torch.autograd.backward(objective.token_mean(terms.loss, total_tokens=total_tokens))
        return terms.sums()


def _completion_tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.completion_ids) for sample in samples)


def _metrics(sums: Tensor, updates: Sequence[Update], *, tokens: int) -> dict[str, float]:
    parallel.sum_dp([sums])
    means = dict(zip(METRIC_NAMES, (sums / tokens).tolist(), strict=True))
    return means | {
        "grad_norm": updates[-1].grad_norm,
        "lr": updates[-1].lr,
        "skipped_updates": float(sum(update.skipped for update in updates)),
        "tokens": float(tokens),
    }
