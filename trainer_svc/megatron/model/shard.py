"""How one tensor lies over the ranks that share its linear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """The dimension that ranks split, None where each holds the whole.

    The whole consists of `blocks` equal ones along it, of which every rank has its part: gate and
    up of a fused linear.
    """

    dim: int | None
    blocks: int = 1

    def part(self, whole: Tensor, *, rank: int, size: int) -> Tensor:
        """What rank `rank` of `size` holds of the whole."""
        if self.dim is None or size == 1:
            return whole
        blocks = whole.chunk(self.blocks, self.dim)
        return torch.cat([block.chunk(size, self.dim)[rank] for block in blocks], self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Inverse of `part`, from all ranks' in rank order."""
        if self.dim is None or len(parts) == 1:
            return parts[0]
        blocks = [part.chunk(self.blocks, self.dim) for part in parts]
        return torch.cat([part[n] for n in range(self.blocks) for part in blocks], self.dim)
