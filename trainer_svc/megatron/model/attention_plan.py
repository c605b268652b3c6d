"""Which tokens of a row go into which call of the attention kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_WASTE = 1.5
"""Pairs of query and key that a block may compute, of those that its segments need."""

_FREE_PAIRS = 2048
"""Pairs that cost less than another call of the kernel."""

_PLANS_KEPT = 16


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Segments of like shape, attended to in one call; shorter ones are padded on the right.

    `queries` and `keys` say which tokens: a slice of the row, or (rows * width,) indices.
    `mask` (rows, 1, queries, keys) is True where attention is allowed; None means causal.
    """

    rows: int
    queries: slice | Tensor
    keys: slice | Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """`order` (T,) finds every token among the blocks' outputs; None where they lie in order."""

    blocks: tuple[AttentionBlock, ...]
    order: Tensor | None


def attention_plan(layout: Tensor, *, device: torch.device) -> AttentionPlan:
    """The plan of a layout, its indices on `device`; made once for all layers.

    It is kept by value, as recomputation brings a copy of the layout.
    """
    return _plan(layout.numpy().tobytes(), device)


@lru_cache(maxsize=_PLANS_KEPT)
def _plan(layout: bytes, device: torch.device) -> AttentionPlan:
    segments = torch.frombuffer(bytearray(layout), dtype=torch.int64).view(-1, 4)
    order = torch.empty(int(segments[:, 1].sum()), dtype=torch.int64)
    blocks = []
    offset = 0
    for group in _groups(segments):
        begin, length = group[:, 0:1], group[:, 1:2]
        place = torch.arange(int(length.max()))
        # Padding repeats the last token: behind all others, no query but its own sees it.
        queries = begin + torch.minimum(place, length - 1)
        outputs = torch.arange(offset, offset + queries.numel()).view_as(queries)
        real = place < length
        order[queries[real]] = outputs[real]
        offset += queries.numel()
        blocks.append(_block(group, queries, device))
    in_order = len(order) == offset and torch.equal(order, torch.arange(offset))
    return AttentionPlan(tuple(blocks), None if in_order else order.to(device))


def _groups(segments: Tensor) -> Iterator[Tensor]:
    """Segments (n, 4) of like shape together: those without a prompt first, the longest first."""
    rows = sorted(segments.tolist(), key=lambda s: (s[3] > 0, -s[3] - s[1], -s[1]))
    group: list[list[int]] = []
    width = needed = 0
    for row in rows:
        _, length, _, prompt_length = row
        pairs = length * (prompt_length + length)
        if group:
            computed = (len(group) + 1) * max(width, length) * (group[0][3] + group[0][1])
            alike = (prompt_length > 0) == (group[0][3] > 0)
            if not alike or computed > _WASTE * (needed + pairs) + _FREE_PAIRS:
                yield torch.tensor(group)
                group, width, needed = [], 0, 0
        group.append(row)
        width, needed = max(width, length), needed + pairs
    yield torch.tensor(group)


def _block(group: Tensor, queries: Tensor, device: torch.device) -> AttentionBlock:
    """Of segments (n, 4) and their tokens (n, width); keys are a prompt's, then a segment's own."""
    begin, length, prompt_begin, prompt_length = torch.split(group, 1, dim=1)
    if not prompt_length.any():
        chosen = _indices(queries, device)
        return AttentionBlock(len(group), chosen, chosen, None)
    key = torch.arange(int((prompt_length + length).max()))
    own = begin + torch.minimum(key - prompt_length, length - 1)
    keys = torch.where(key < prompt_length, prompt_begin + key, own)
    query = torch.arange(queries.shape[1])
    mask = (key <= (prompt_length + query)[..., None])[:, None]
    return AttentionBlock(
        len(group), _indices(queries, device), _indices(keys, device), mask.to(device)
    )


def _indices(table: Tensor, device: torch.device) -> slice | Tensor:
    """Which tokens, row after row; a slice needs no copy of them."""
    flat = table.flatten()
    first = int(flat[0])
    if torch.equal(flat, torch.arange(first, first + len(flat))):
        return slice(first, first + len(flat))
    return flat.to(device)
