"""One rank's share of training: model, adapter, objective and optimizer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from common.adapter import Dtype, Manifest
from common.errors import ConfigError
from trainer_svc.megatron import device, parallel, rng
from trainer_svc.megatron.adapter_io.export import AdapterExporter
from trainer_svc.megatron.adapter_io.load import load_adapter
from trainer_svc.megatron.adapter_io.merge import MergedExporter
from trainer_svc.megatron.lora.layers import add_lora, trained_tensors
from trainer_svc.megatron.lora.movable_base import MovableBase
from trainer_svc.megatron.lora.plan import plan_adapter
from trainer_svc.megatron.lora.policies import DEFAULT, REFERENCE, PolicyAdapters
from trainer_svc.megatron.model.build import build_model
from trainer_svc.megatron.protocol import Batch
from trainer_svc.megatron.settings import WorkerSettings
from trainer_svc.megatron.training.dealing import deal
from trainer_svc.megatron.training.objective import Objective, metric_sums
from trainer_svc.megatron.training.optimizer import AdapterOptimizer, Update
from trainer_svc.megatron.training.packing import MicroBatch, pack
from trainer_svc.megatron.training.policy import completion_scores, token_batch
from trainer_svc.megatron.training.schedule import forward, forward_backward, in_step, row_multiple


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
        parallel.start(settings.parallel)
        rng.seed(settings.seed)
        self.settings = settings
        self.base = build_model(
            settings.model_dir,
            dtype=getattr(torch, settings.dtype),
            parallel=settings.parallel,
            recompute=settings.train.recompute,
        )
        self.plan = plan_adapter(self.base.config, settings.lora)
        add_lora(self.base, plan=self.plan, seed=settings.seed)
        if settings.adapter_path is not None:
            load_adapter(self.base, settings.adapter_path, plan=self.plan)
        self.optimizer = AdapterOptimizer(
            trained_tensors(self.base.chunks), settings=settings.train
        )
        self.policies = PolicyAdapters(self.base.chunks, masters=self.optimizer.masters())
        self.exporter = AdapterExporter(
            self.base, plan=self.plan, base_model_name=str(settings.model_dir)
        )
        self._objective = Objective(settings.train)
        self.movable_base = MovableBase(self.base.chunks, device=device.compute_device())
        if settings.offload_base:
            self.movable_base.offload()

    def logprobs(self, batch: Batch) -> list[list[float]]:
        """Log-probability of every completion token under the current policy, sample by sample.

        Raises:
            ConfigError: a token is outside the vocabulary.
        """
        self._check_tokens(batch)
        share = self._share(batch, range(len(batch.samples)))
        lengths = [len(sample.completion_ids) for sample in batch.samples]
        flat = torch.zeros(sum(lengths), device=device.compute_device())
        places = torch.split(flat, lengths)
        values = self._evaluate(share.micros, temperature=batch.temperature)
        if parallel.speaks_for_copy():
            for micro, value in zip(share.micros, values, strict=True):
                for index, part in zip(
                    micro.order, torch.split(value, list(micro.lengths)), strict=True
                ):
                    places[share.indices[index]].copy_(part)
        parallel.sum_over_all(flat)
        return [place.tolist() for place in places]

    def step(self, batch: Batch) -> dict[str, float]:
        """One policy update, in `minibatches` optimizer updates; its metrics.

        Means over completion tokens: what `Objective` reports. Of the last update: `grad_norm`
        before clipping, and `lr`. Then `skipped_updates`, `tokens` (of completions), `seconds`.

        Raises:
            ConfigError: a token is outside the vocabulary.
        """
        self._check_tokens(batch)
        started = time.perf_counter()
        parts = min(self.settings.train.minibatches, len(batch.samples))
        shares = [self._share(batch, indices) for indices in deal(batch.samples, parts=parts)]
        sampled = self._sampled(shares, temperature=batch.temperature)
        sums: Counter[str] = Counter()
        updates: list[Update] = []
        for share, values in zip(shares, sampled, strict=True):
            sums.update(self._accumulate(share, values, batch=batch, on_policy=parts == 1))
            updates.append(self.optimizer.step())
        tokens = sum(len(sample.completion_ids) for sample in batch.samples)
        return _metrics(sums, updates, tokens=tokens) | {"seconds": time.perf_counter() - started}

    def export(
        self,
        path: Path,
        *,
        base_fingerprint: str,
        dtype: Dtype | None = None,
        adapter: str = DEFAULT,
    ) -> Manifest | None:
        """Write a policy's flat buffer as a file; the manifest on rank 0, None elsewhere.

        Raises:
            AdapterNotFound: no policy is called so.
        """
        if adapter == REFERENCE:
            return self.exporter.reference_to_file(
                path, base_fingerprint=base_fingerprint, dtype=dtype
            )
        self.policies.masters(adapter)
        return self.exporter.to_file(
            path, base_fingerprint=base_fingerprint, dtype=dtype, adapter=adapter
        )

    def export_merged(self, path: Path, *, base_fingerprint: str) -> Manifest | None:
        """Write the whole model with the adapter merged into it, as `export` does the adapter."""
        return self._merged_exporter.to_file(path, base_fingerprint=base_fingerprint)

    @cached_property
    def _merged_exporter(self) -> MergedExporter:
        return MergedExporter(self.base)

    def _check_tokens(self, batch: Batch) -> None:
        """Tensor-parallel ranks would take an unknown token for one without an embedding."""
        size = self.base.config.vocab_size
        for sample in batch.samples:
            ids = (*sample.prompt_ids, *sample.completion_ids)
            if min(ids) < 0 or max(ids) >= size:
                odd = next(token for token in ids if not 0 <= token < size)
                raise ConfigError(
                    f"sample: token {odd} is outside the model's vocabulary of {size}; use the "
                    "model's own tokenizer"
                )

    def _share(self, batch: Batch, indices: Sequence[int]) -> _Share:
        """What this rank's copy of the model takes of a minibatch."""
        samples = [batch.samples[index] for index in indices]
        weights = self._objective.weights([len(sample.completion_ids) for sample in samples])
        mine = deal(samples, parts=parallel.dp_size())[parallel.dp_rank()]
        micros = pack(
            [samples[index] for index in mine],
            sequences=self.settings.train.sequences,
            token_budget=self.settings.train.micro_batch_tokens,
            device=device.compute_device(),
            multiple_of=row_multiple(self.base.chunks),
        )
        return _Share(
            tuple(indices[index] for index in mine),
            tuple(weights[index] for index in mine),
            tuple(in_step(micros, self.base.chunks)),
        )

    def _sampled(
        self, shares: Sequence[_Share], *, temperature: float
    ) -> list[list[Tensor] | None]:
        """Log-probabilities under the policy before the step; None where `_accumulate` finds them.

        The first of several updates moves the policy, and dropout adds noise to it.
        """
        if len(shares) == 1 and self.settings.lora.dropout == 0:
            return [None]
        return [self._evaluate(share.micros, temperature=temperature) for share in shares]

    def _evaluate(self, micros: Sequence[MicroBatch], *, temperature: float) -> list[Tensor]:
        """Log-probabilities without gradient and without dropout; on the last stage only."""
        model = self.base.chunks[-1]

        def output(number: int, hidden: Tensor) -> Tensor:
            scores = completion_scores(model, hidden, micros[number], temperature=temperature)
            return scores.logprobs

        return forward(micros, self.base.chunks, output=output)

    def _accumulate(
        self, share: _Share, sampled: list[Tensor] | None, *, batch: Batch, on_policy: bool
    ) -> Counter[str]:
        """Add one minibatch's gradient; the sums of its metrics over this rank's tokens."""
        model = self.base.chunks[-1]
        reference: list[Tensor] | None = None
        if self._objective.needs_reference:
            with self.policies.use_adapter(self.settings.train.kl_to):
                reference = self._evaluate(share.micros, temperature=batch.temperature)

        def output(number: int, hidden: Tensor) -> tuple[Tensor, dict[str, float]]:
            micro = share.micros[number]
            tokens = token_batch(
                micro,
                completion_scores(model, hidden, micro, temperature=batch.temperature),
                sampled=sampled[number] if sampled else None,
                reference=reference[number] if reference else None,
                on_policy=on_policy,
                weights=share.weights,
            )
            terms = self._objective(tokens)
            return (tokens.weights * terms.per_token).sum(), metric_sums(terms)

        sums: Counter[str] = Counter()
        for found in forward_backward(
            share.micros,
            self.base.chunks,
            output=output,
            learns=lambda micro: self._objective.learns(rewarded=micro.rewarded),
        ):
            sums.update(found)
        return sums


@dataclass(frozen=True, slots=True)
class _Share:
    """A minibatch's samples for one copy of the model.

    Attributes:
        indices: the samples' numbers in the batch.
        weights: of each sample's tokens in the whole minibatch's loss.
        micros: their rows; a row's `order` counts in the two above.
    """

    indices: tuple[int, ...]
    weights: tuple[float, ...]
    micros: tuple[MicroBatch, ...]


def _metrics(sums: Counter[str], updates: Sequence[Update], *, tokens: int) -> dict[str, float]:
    """A step's metrics on every rank, from each rank's own sums."""
    total: Counter[str] = Counter()
    for found in parallel.gather_objects(sums if parallel.speaks_for_copy() else Counter()):
        total.update(found)
    return {name: value / tokens for name, value in total.items()} | {
        "grad_norm": updates[-1].grad_norm,
        "lr": updates[-1].lr,
        "skipped_updates": float(sum(update.skipped for update in updates)),
        "tokens": float(tokens),
    }
