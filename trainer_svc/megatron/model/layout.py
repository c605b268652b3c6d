"""How one row of tokens is made up of sequences.

A layout is an int64 tensor on the host, of shape (segments, 4). A row of it is one segment:
(begin, length, prompt_begin, prompt_length). Tokens [begin, begin + length) attend causally to
themselves and, where prompt_length is above 0, fully to [prompt_begin, prompt_begin +
prompt_length). Segments cover the row of tokens once, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def causal_layout(lengths: Sequence[int]) -> Tensor:
    """Sequences of these lengths one after another, each blind to the others: (segments, 4)."""
    ends = torch.tensor(lengths).cumsum(0)
    layout = torch.zeros(len(lengths), 4, dtype=torch.int64)
    layout[:, 1] = torch.tensor(lengths)
    layout[:, 0] = ends - layout[:, 1]
    return layout


def num_tokens(layout: Tensor) -> int:
    """Length of the row, padding included."""
    return int(layout[:, 1].sum())


def token_positions(layout: Tensor) -> Tensor:
    """Every token's place in its own sequence, a prompt counted in: (T,) int64 on the host."""
    positions = torch.empty(num_tokens(layout), dtype=torch.int64)
    for begin, length, _, prompt_length in layout.tolist():
        positions[begin : begin + length] = torch.arange(prompt_length, prompt_length + length)
    return positions
