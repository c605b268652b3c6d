"""LoRA (arXiv 2106.09685) on Megatron's linears, split over tensor-parallel ranks as these are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import dropout, linear

from trainer_svc.megatron.lora import dora
from trainer_svc.megatron.lora.fusing import fuse_rows, side_by_side
from trainer_svc.megatron.lora.pair import A, LoraPair, site_group
from trainer_svc.megatron.lora.plan import Site
from trainer_svc.megatron.lora.settings import LoraSettings
from trainer_svc.megatron.model.base_config import Heads
from trainer_svc.megatron.model.linears import Split

_ACROSS_RANKS = {
    (Split.ROWS, False): copy_to_tensor_model_parallel_region,
    (Split.ROWS, True): gather_from_sequence_parallel_region,
    (Split.COLUMNS, False): reduce_from_tensor_model_parallel_region,
    (Split.COLUMNS, True): reduce_scatter_to_sequence_parallel_region,
}
"""What `A x` goes through: by the base's split, and whether tokens are split between linears."""


class LoraLinear(nn.Module):
    """A frozen Megatron linear plus `scale * B A x` of the adapter in use.

    Column-parallel base: A (rank, in) is whole on every rank, B (out, rank) holds this rank's
    rows. Row-parallel base: A holds this rank's columns, B is whole. The arithmetic is in the
    output's type, as the rollout's is; the parameters may be wider.
    """

    def __init__(
        self,
        base: nn.Module,
        *,
        site: Site,
        site_number: int,
        expert: int | None,
        heads: Heads,
        settings: LoraSettings,
        adapters: nn.ModuleDict,
    ) -> None:
        """
        Args:
            site_number: the site's place in the plan.
            expert: which expert's linear this is, counted over the whole model.
            heads: of the whole model.
            adapters: by name, the site's pairs; one object for all experts that share them.
        """
        super().__init__()
        self.base = base
        self.site = site
        self.site_number = site_number
        self.expert = expert
        self.adapters = adapters
        self.active: str | None = "default"
        """Name of the adapter in use; None for the base alone."""

        self.group: ProcessGroup = site_group(site)
        """Ranks that the weight is split over, or, of a router, that each hold all of it."""

        self.size = self.group.size()
        self.heads = heads
        config: Any = base.config
        self.sequence_parallel = (
            config.sequence_parallel and self.size > 1 and not site.linear.is_expert
        )
        self.pre_dropout = settings.dropout if settings.dropout_position == "pre" else 0.0
        self.post_dropout = settings.dropout if settings.dropout_position == "post" else 0.0

    @property
    def weight(self) -> Tensor:
        """This rank's part of the base's weight (out, in)."""
        return self.base.weight  # type: ignore[return-value]

    def is_partial(self, leaf: str) -> bool:
        """Whether a tensor's gradient on one rank of `group` is a summand of the whole one.

        Under sequence parallelism, that of every tensor that works on one rank's tokens; in an
        expert, whose dispatcher sums over the ranks, of every tensor that these hold alike.
        """
        split = self.site.linear.split
        if split is Split.NONE:
            return self.sequence_parallel
        is_whole_on_all = (leaf == A) == (split is Split.ROWS)
        summed_later = self.site.linear.is_expert and self.size > 1
        return is_whole_on_all and (self.sequence_parallel or summed_later)

    def pairs(self, adapter: str) -> list[LoraPair]:
        """The pairs of one adapter."""
        return list(cast("nn.ModuleList", self.adapters[adapter]))  # type: ignore[arg-type]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Output (seq, batch, out) and the base's bias, of x (seq, batch, in)."""
        output, bias = self.base(x, *args, **kwargs)
        if self.active is None:
            return output, bias
        return self.adapted(x, output, added_bias=self._added(bias)), bias

    def adapted(self, x: Tensor, output: Tensor, *, added_bias: Tensor | None = None) -> Tensor:
        """The base's output (..., out) of x (..., in), with what the adapter in use makes of it.

        `added_bias` is what `output` contains.
        """
        assert self.active is not None
        pairs = self.pairs(self.active)
        hidden = self._hidden(x.to(output.dtype), pairs)
        if pairs[0].magnitude is not None and added_bias is not None:
            output = output - added_bias
        lora_b = self._lora_b(pairs).to(output.dtype)
        summed = self._add(output, hidden, lora_b, scale=pairs[0].pair.scale)
        if pairs[0].magnitude is None:
            return summed
        # In float32, as bfloat16 has no number between 1 and 1.0078 for a factor.
        summed = (summed * dora.row_factor(self, pairs[0])).to(output.dtype)
        return summed if added_bias is None else summed + added_bias

    def _added(self, returned: Tensor | None) -> Tensor | None:
        """The base's bias, which is in its output unless a Megatron linear returns it."""
        bias: Tensor | None = getattr(self.base, "bias", None)
        # Of Transformer Engine's linears that have none, it is empty.
        is_added = returned is None and bias is not None and bias.numel() > 0
        return bias if is_added else None

    def _hidden(self, x: Tensor, pairs: list[LoraPair]) -> Tensor:
        """A x (..., sum of the pairs' ranks), of all tokens and whole for this rank's B.

        The collective sits on the narrow side: rank-sized forward for a row-parallel base, and
        backward for a column-parallel one, whose ranks each see a part of B's gradient.
        """
        if self.pre_dropout and self.training:
            x = dropout(x, self.pre_dropout)
        lora_a = pairs[0].lora_a if len(pairs) == 1 else torch.cat([p.lora_a for p in pairs])
        hidden = linear(x, lora_a.to(x.dtype))
        split = self.site.linear.split
        if self.size == 1 or split is Split.NONE or self.site.linear.is_expert:
            return hidden
        across: Callable[..., Tensor] = _ACROSS_RANKS[split, self.sequence_parallel]
        return across(hidden, group=self.group)

    def _lora_b(self, pairs: list[LoraPair]) -> Tensor:
        """B (out, sum of the pairs' ranks) as the base's rows lie, on the first pair's scale."""
        if self._is_fused(pairs):
            return pairs[0].lora_b
        common = pairs[0].pair.scale
        factors = side_by_side(
            [
                p.lora_b if p.pair.scale == common else p.lora_b * (p.pair.scale / common)
                for p in pairs
            ]
        )
        return self.fused_rows(pairs, factors)

    def _add(self, output: Tensor, hidden: Tensor, lora_b: Tensor, *, scale: float) -> Tensor:
        """output + scale * B hidden."""
        if self.post_dropout and self.training:
            delta = linear(hidden, lora_b)
            return torch.add(output, dropout(delta, self.post_dropout), alpha=scale)
        flat, rows = hidden.flatten(0, -2), output.flatten(0, -2)
        return torch.addmm(rows, flat, lora_b.t(), alpha=scale).view_as(output)

    def fused_rows(self, pairs: list[LoraPair], factors: list[Tensor]) -> Tensor:
        """Rows (out, ...) of the base from those of each pair, (its own rows, ...)."""
        if self._is_fused(pairs):
            return factors[0]
        parts = {p.pair.projections[0]: f for p, f in zip(pairs, factors, strict=True)}
        size = self.size if self.site.linear.split is Split.ROWS else 1
        return fuse_rows(self.site.linear, parts, size=size, heads=self.heads)

    def _is_fused(self, pairs: list[LoraPair]) -> bool:
        return pairs[0].pair.projections == self.site.linear.projections
