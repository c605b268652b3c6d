"""Which ranks hold what of the adapter: found once, with one collective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch.distributed as dist

from trainer_svc.megatron import parallel
from trainer_svc.megatron.adapter_io.places import leaves
from trainer_svc.megatron.lora.layers import LoraLinear
from trainer_svc.megatron.lora.pair import leaf_shape, leaf_shard
from trainer_svc.megatron.lora.plan import AdapterPlan


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank sends of one tensor: part `index` of `size`, or the whole (size 1)."""

    site: int
    pair: int
    leaf: str
    index: int
    size: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sends of one layer, in one message."""

    rank: int
    parts: tuple[Part, ...]


def find_messages(plan: AdapterPlan, linears: Iterable[LoraLinear]) -> tuple[Message, ...]:
    """All messages of an export in the order in which rank 0 takes them; every rank must call this.

    Of ranks that hold the same, the lowest sends it, with those that share the linear with it. The
    order is that of layers, then of ranks; every rank sends its own in this order and waits for
    none but rank 0, so no two can wait for each other.
    """
    held = {
        linear.site_number: tuple(dist.get_process_group_ranks(linear.group)) for linear in linears
    }
    senders: dict[int, tuple[int, ...]] = {}
    for of_rank in parallel.gather_objects(held):
        for number, ranks in of_rank.items():
            senders.setdefault(number, ranks)
    parts: dict[tuple[int, int], list[Part]] = {}
    for number, site in enumerate(plan.sites):
        for rank, part in _parts(plan, number, senders[number]):
            parts.setdefault((site.layer, rank), []).append(part)
    return tuple(Message(rank, tuple(parts[layer, rank])) for layer, rank in sorted(parts))


def _parts(plan: AdapterPlan, number: int, ranks: tuple[int, ...]) -> Iterator[tuple[int, Part]]:
    """What each rank sends of one site; of a tensor that all of them hold, the first alone."""
    site = plan.sites[number]
    for pair_number, pair in enumerate(site.pairs):
        for leaf in leaves(plan):
            shape, split = leaf_shape(site, pair, leaf), leaf_shard(site, pair, leaf).dim
            senders = ranks if split is not None else ranks[:1]
            size = len(senders)
            own = tuple(n // size if dim == split else n for dim, n in enumerate(shape))
            for index, rank in enumerate(senders):
                yield rank, Part(number, pair_number, leaf, index, size, own)
