"""Micro-batches: one row of tokens each, made of many samples' sequences.

`shared` computes a prompt once for all its completions, which see it and themselves; `packed` lays
whole samples end to end; `padded` makes every sample as long as the row's longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer_svc.megatron.protocol import Sample

Sequences = Literal["shared", "packed", "padded"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass. Completion tokens of all samples lie flat, sample after sample.

    Attributes:
        order: index of every sample in the sequence that was packed.
        lengths: completion tokens of every sample.
        tokens: (T,) ids of the row.
        layout: (segments, 4) int64 on the host; see `model/layout.py`.
        sources: (num_tokens,) the token of the row that each completion token is predicted from.
        targets: (num_tokens,) the completion tokens.
        advantages, rollout_logprobs: (num_tokens,) float32.
    """

    order: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: Tensor
    layout: Tensor
    sources: Tensor
    targets: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor

    @property
    def rewarded(self) -> bool:
        """Whether any advantage differs from zero; without, the policy loss has no gradient."""
        return bool(self.advantages.any())


def pack(
    samples: Sequence[Sample],
    *,
    sequences: Sequences,
    token_budget: int,
    device: torch.device,
    multiple_of: int = 1,
) -> list[MicroBatch]:
    """Deal samples out to rows of at most `token_budget` tokens, the same way every time.

    Samples without an advantage go apart, so that their rows need no backward pass; where prompts
    are shared, those whose siblings have none either. A sample above the budget goes alone.

    Args:
        multiple_of: rows are padded to a length that this divides.
    """
    units = _units(samples, shared=sequences == "shared", token_budget=token_budget)
    rows = _fill(units, padded=sequences == "padded", token_budget=token_budget)
    return [
        _build(samples, row, sequences=sequences, device=device, multiple_of=multiple_of)
        for row in rows
    ]


def idle(*, multiple_of: int, device: torch.device) -> MicroBatch:
    """A row of padding without a sample, for ranks that must keep step with others."""
    return _build([], [], sequences="packed", device=device, multiple_of=multiple_of)


def prompt_groups(samples: Sequence[Sample]) -> list[list[int]]:
    """Indices of the samples of every prompt, in the order in which prompts appear."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.prompt_ids, []).append(index)
    return list(groups.values())


@dataclass(frozen=True, slots=True)
class _Unit:
    """Samples that stay together, and the tokens that they need in a row."""

    indices: tuple[int, ...]
    num_tokens: int
    rewarded: bool


def _units(samples: Sequence[Sample], *, shared: bool, token_budget: int) -> Iterator[_Unit]:
    groups = prompt_groups(samples) if shared else [[index] for index in range(len(samples))]
    for group in groups:
        prompt = len(samples[group[0]].prompt_ids)
        chosen: list[int] = []
        total = prompt
        for index in group:
            # What follows a completion's last token is nothing to learn from.
            own = len(samples[index].completion_ids) - 1
            if chosen and total + own > token_budget:
                yield _unit(samples, chosen, num_tokens=total)
                chosen, total = [], prompt
            chosen.append(index)
            total += own
        yield _unit(samples, chosen, num_tokens=total)


def _unit(samples: Sequence[Sample], indices: Sequence[int], *, num_tokens: int) -> _Unit:
    rewarded = any(samples[index].advantage != 0 for index in indices)
    return _Unit(tuple(indices), num_tokens, rewarded)


def _fill(units: Iterator[_Unit], *, padded: bool, token_budget: int) -> list[list[_Unit]]:
    """Every unit into the first row with room for it, the longest first."""
    rows: list[list[_Unit]] = []
    for unit in sorted(units, key=lambda u: (not u.rewarded, -u.num_tokens)):
        for row in rows:
            used = len(row) * row[0].num_tokens if padded else sum(u.num_tokens for u in row)
            own = row[0].num_tokens if padded else unit.num_tokens
            if row[0].rewarded == unit.rewarded and used + own <= token_budget:
                row.append(unit)
                break
        else:
            rows.append([unit])
    return rows


class _Row:
    """A row that grows by segments."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.layout: list[tuple[int, int, int, int]] = []
        self.sources: list[int] = []

    def add_shared(self, samples: Sequence[Sample]) -> None:
        """A prompt, and all its completions."""
        prompt = samples[0].prompt_ids
        begin = self._add(prompt)
        for sample in samples:
            own = self._add(sample.completion_ids[:-1], prompt=(begin, len(prompt)))
            self.sources += [begin + len(prompt) - 1, *range(own, len(self.tokens))]

    def add_whole(self, sample: Sample, *, width: int) -> None:
        """A sample as a sequence of its own, padded on the right, where nothing sees it."""
        ids = (*sample.prompt_ids, *sample.completion_ids[:-1])
        begin = self._add((*ids, *[0] * (width - len(ids))))
        self.sources += range(begin + len(sample.prompt_ids) - 1, begin + len(ids))

    def pad(self, *, multiple_of: int) -> None:
        """Up to a multiple, by a segment that nothing sees; a row is never empty."""
        wanted = -(-max(1, len(self.tokens)) // multiple_of) * multiple_of
        self._add([0] * (wanted - len(self.tokens)))

    def _add(self, ids: Sequence[int], *, prompt: tuple[int, int] = (0, 0)) -> int:
        """A segment that sees itself and a prompt (begin, length); where it begins."""
        begin = len(self.tokens)
        if ids:
            self.tokens += ids
            self.layout.append((begin, len(ids), *prompt))
        return begin


def _build(
    samples: Sequence[Sample],
    units: Sequence[_Unit],
    *,
    sequences: Sequences,
    device: torch.device,
    multiple_of: int,
) -> MicroBatch:
    row = _Row()
    for unit in units:
        chosen = [samples[index] for index in unit.indices]
        if sequences == "shared":
            row.add_shared(chosen)
        else:
            width = units[0].num_tokens if sequences == "padded" else unit.num_tokens
            row.add_whole(chosen[0], width=width)
    row.pad(multiple_of=multiple_of)
    order = tuple(index for unit in units for index in unit.indices)
    chosen = [samples[index] for index in order]
    lengths = [len(sample.completion_ids) for sample in chosen]
    advantages = torch.tensor([s.advantage for s in chosen], dtype=torch.float32)
    return MicroBatch(
        order=order,
        lengths=tuple(lengths),
        tokens=torch.tensor(row.tokens).to(device),
        layout=torch.tensor(row.layout),
        sources=torch.tensor(row.sources, dtype=torch.int64).to(device),
        targets=_flat([s.completion_ids for s in chosen], torch.int64).to(device),
        advantages=advantages.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)).to(
            device
        ),
        rollout_logprobs=_flat([s.rollout_logprobs for s in chosen], torch.float32).to(device),
    )


def _flat(values: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    return torch.tensor([value for part in values for value in part], dtype=dtype)
