"""Micro-batches: samples of like length, right-padded, within a budget of padded tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer_svc.megatron.protocol import Sample


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass. Completion tokens of all rows lie flat, row after row.

    Attributes:
        order: index of every row's sample in the sequence that was split.
        lengths: completion tokens of every row.
        tokens: (rows, seq) ids, padded on the right with 0.
        rows, positions: (num_tokens,) where in `tokens` each completion token is predicted,
            one place before its own.
        targets: (num_tokens,) the completion tokens.
        advantages, rollout_logprobs: (num_tokens,) float32.
    """

    order: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: Tensor
    rows: Tensor
    positions: Tensor
    targets: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor

    @property
    def rewarded(self) -> bool:
        """Whether any advantage differs from zero; without, the policy loss has no gradient."""
        return bool(self.advantages.any())


def micro_batches(
    samples: Sequence[Sample], *, token_budget: int, device: torch.device
) -> list[MicroBatch]:
    """Split samples, longest first, those without an advantage apart from the others."""
    order = sorted(
        range(len(samples)),
        key=lambda i: (samples[i].advantage == 0, -samples[i].num_tokens),
    )
    groups: list[list[int]] = []
    for index in order:
        kind = samples[index].advantage == 0
        fits = (
            bool(groups)
            and (samples[groups[-1][0]].advantage == 0) == kind
            and (len(groups[-1]) + 1) * samples[groups[-1][0]].num_tokens <= token_budget
        )
        if fits:
            groups[-1].append(index)
        else:
            groups.append([index])
    return [_build(samples, group, device=device) for group in groups]


def _build(samples: Sequence[Sample], group: Sequence[int], *, device: torch.device) -> MicroBatch:
    chosen = [samples[index] for index in group]
    width = max(sample.num_tokens for sample in chosen)
    tokens = torch.zeros(len(chosen), width, dtype=torch.int64)
    rows: list[int] = []
    positions: list[int] = []
    for row, sample in enumerate(chosen):
        ids = (*sample.prompt_ids, *sample.completion_ids)
        tokens[row, : len(ids)] = torch.tensor(ids)
        rows += [row] * len(sample.completion_ids)
        positions += range(len(sample.prompt_ids) - 1, len(ids) - 1)
    lengths = [len(sample.completion_ids) for sample in chosen]
    advantages = torch.tensor([s.advantage for s in chosen]).repeat_interleave(
        torch.tensor(lengths)
    )
    rollout = [value for sample in chosen for value in sample.rollout_logprobs]
    index_rows, index_positions = torch.tensor(rows), torch.tensor(positions)
    return MicroBatch(
        order=tuple(group),
        lengths=tuple(lengths),
        tokens=tokens.to(device),
        rows=index_rows.to(device),
        positions=index_positions.to(device),
        targets=tokens[index_rows, index_positions + 1].to(device),
        advantages=advantages.to(device),
        rollout_logprobs=torch.tensor(rollout).to(device),
    )
