"""Rows of a Megatron linear from those of its projections, on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn.functional import pad

from trainer_svc.megatron.model import names
from trainer_svc.megatron.model.base_config import Heads
from trainer_svc.megatron.model.linears import Linear, Projection


def fuse_rows(
    linear: Linear, parts: Mapping[Projection, Tensor], *, size: int, heads: Heads
) -> Tensor:
    """Rows (out, columns) of this rank's part; those of projections that are not there are zero.

    Args:
        parts: by projection, this rank's rows (its out, columns).
        size: number of ranks that share the rows.
        heads: of the whole model.
    """
    some = next(iter(parts.values()))
    rows = [
        parts[p] if p in parts else some.new_zeros(p.out_features // size, some.shape[1])
        for p in linear.projections
    ]
    own = Heads(heads.heads // size, heads.groups // size, heads.head_dim)
    return names.fuse(linear.fusion, rows, heads=own)


def side_by_side(factors: Sequence[Tensor]) -> list[Tensor]:
    """Each (rows, r) widened by zeros, so that its columns are its own among those of all."""
    ranks = [factor.shape[1] for factor in factors]
    return [pad(factor, (sum(ranks[:n]), sum(ranks[n + 1 :]))) for n, factor in enumerate(factors)]
