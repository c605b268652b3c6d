"""One rank's part of an A, B or magnitude, in the pieces that PEFT has of it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trainer_svc.megatron.lora.pair import A, leaf_shard
from trainer_svc.megatron.lora.plan import Pair, Site
from trainer_svc.megatron.model import names
from trainer_svc.megatron.model.base_config import Heads
from trainer_svc.megatron.model.linears import Split


def own_part(site: Site, pair: Pair, leaf: str, piece: Tensor, *, index: int, size: int) -> Tensor:
    """What rank `index` of `size` holds of a whole piece, in the piece's own memory.

    Every projection's rows are split over the ranks, so there are no blocks here.
    """
    dim = leaf_shard(site, pair, leaf).dim
    return piece if dim is None else piece.chunk(size, dim)[index]


def split_part(
    site: Site, pair: Pair, leaf: str, part: Tensor, *, size: int, heads: Heads
) -> Sequence[Tensor]:
    """A rank's part, which `size` ranks have one of each, by projection: A as it is, B's rows."""
    if leaf == A or len(pair.projections) == 1:
        return (part,)
    return names.split(site.linear.fusion, part, heads=_own(site, heads, size=size))


def join_part(
    site: Site, pair: Pair, leaf: str, pieces: Sequence[Tensor], *, size: int, heads: Heads
) -> Tensor:
    """Inverse of `split_part`."""
    if leaf == A or len(pair.projections) == 1:
        return pieces[0]
    return names.fuse(site.linear.fusion, pieces, heads=_own(site, heads, size=size))


def _own(site: Site, heads: Heads, *, size: int) -> Heads:
    """The heads of one rank."""
    shared = size if site.linear.split is Split.ROWS else 1
    return Heads(heads.heads // shared, heads.groups // shared, heads.head_dim)
