"""What trains, tensor by tensor, and how each lies over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import nn
from torch.distributed import ProcessGroup

from trainer_svc.megatron.lora.linear import LoraLinear
from trainer_svc.megatron.lora.pair import LEAVES, leaf_shape, leaf_shard
from trainer_svc.megatron.lora.plan import Site
from trainer_svc.megatron.model.shard import Shard


@dataclass(frozen=True, slots=True)
class TrainedTensor:
    """One tensor of an adapter: this rank's part, and what it is a part of."""

    name: str
    """Unique over the model and the same on all ranks: the site's, the pair's number, the leaf's
    (`decoder.layers.3.self_attention.linear_qkv.0.lora_a`)."""

    parameter: nn.Parameter

    whole_shape: tuple[int, ...]

    split_dim: int | None
    """Dimension that is split over `group`; None where every rank of it holds the whole."""

    blocks: int
    """Equal blocks of the whole along `split_dim`, each split over the ranks."""

    group: ProcessGroup
    """Ranks that share the linear."""

    site: Site

    pair_number: int

    is_expert: bool
    """Its gradient is summed over the expert-data-parallel group, else over the data-parallel."""

    is_shared_by_experts: bool
    """One adapter for all experts of a layer: its gradient is summed over every rank of the
    pipeline stage that holds the same part."""

    partial_over_tp: bool
    """Its gradient on one rank of `group` is a summand of the whole one."""

    @property
    def shard(self) -> Shard:
        return Shard(self.split_dim, self.blocks)


def wrapped_linears(chunks: Sequence[GPTModel]) -> list[LoraLinear]:
    """Every adapted linear of this rank in the plan's order; each expert's own, also where all
    experts of a layer share one adapter."""
    found = [m for chunk in chunks for m in chunk.modules() if isinstance(m, LoraLinear)]
    return sorted(found, key=lambda linear: (linear.site_number, linear.expert or 0))


def lora_linears(chunks: Sequence[GPTModel]) -> Iterator[LoraLinear]:
    """The adapted linears of this rank in the plan's order; a shared expert adapter's comes once,
    that of the rank's first expert."""
    last = -1
    for linear in wrapped_linears(chunks):
        if linear.site_number != last:
            yield linear
        last = linear.site_number


def trained_tensors(chunks: Sequence[GPTModel], *, adapter: str = "default") -> list[TrainedTensor]:
    """Tensors of one adapter that this rank holds, in the plan's order."""
    return [
        tensor for linear in lora_linears(chunks) for tensor in _tensors(linear, adapter=adapter)
    ]


def _tensors(linear: LoraLinear, *, adapter: str) -> Iterator[TrainedTensor]:
    site = linear.site
    for number, pair in enumerate(linear.pairs(adapter)):
        for leaf in LEAVES:
            parameter = getattr(pair, leaf)
            if parameter is None:
                continue
            shard = leaf_shard(site, pair.pair, leaf)
            yield TrainedTensor(
                name=f"{site.name}.{number}.{leaf}",
                parameter=parameter,
                whole_shape=leaf_shape(site, pair.pair, leaf),
                split_dim=shard.dim,
                blocks=shard.blocks,
                group=linear.group,
                site=site,
                pair_number=number,
                is_expert=site.linear.is_expert,
                is_shared_by_experts=site.linear.is_expert and site.expert is None,
                partial_over_tp=linear.is_partial(leaf),
            )
