"""LoRA arithmetic on a CPU: vLLM's own is wrong for mixed batches, and slow.

vLLM 0.32 marks a token without adapter by slot -1 and then indexes with it, so that a base request
beside an adapter's is answered with the last slot's adapter. It also gathers a copy of both factors
for every token. Here the tokens of one slot are one matrix product, and slot -1 is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import vllm
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager

_NO_ADAPTER = -1

_MOST_PADDING = 64
"""Rows that may be computed for nothing where this makes one product over all slots of what were
several: in decoding it costs less, in a prompt of thousands of rows more."""

_WRITTEN_FOR = "0.32."
"""Short of a whole platform plugin vLLM has no hook for this, so it is tied to one release."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of a batch belong to which slot, worked out once a step for all its layers.

        rows = Rows.of(torch.tensor([1, -1, 0, 1]))
        y += rows.scatter(rows.times(rows.gather(x), factors), len(x))

    Args:
        slots: those in use.
        order: the rows with an adapter, slot after slot; None: all rows are of the one slot.
        parts: where in `order` each slot's rows lie.
        padded: for each slot as many rows as the largest has, one after the other; None where most
            of them would be padding.
        positions: where in `padded` those of `order` are.
    """

    slots: tuple[int, ...]
    order: Tensor | None = None
    parts: tuple[slice, ...] = ()
    padded: Tensor | None = None
    positions: Tensor | None = None

    @classmethod
    def of(cls, slots: Tensor) -> Rows:
        """Of each row's slot."""
        used, counts = torch.unique(slots, return_counts=True)
        without = int(counts[0]) if len(used) and used[0] == _NO_ADAPTER else 0
        if without:
            used, counts = used[1:], counts[1:]
        names = tuple(used.tolist())
        if not names or (len(names) == 1 and not without):
            return cls(names)
        order = torch.argsort(slots, stable=True)[without:]
        ends = counts.cumsum(0)
        parts = tuple(map(slice, (ends - counts).tolist(), ends.tolist()))
        most = int(counts.max())
        if len(names) * most - len(order) > _MOST_PADDING:
            return cls(names, order, parts)
        offsets = torch.arange(most).expand(len(names), most)
        within = (ends - counts).unsqueeze(1) + torch.minimum(offsets, counts.unsqueeze(1) - 1)
        positions = torch.nonzero((offsets < counts.unsqueeze(1)).flatten()).squeeze(1)
        return cls(names, order, parts, order[within.flatten()], positions)

    def gather(self, x: Tensor) -> Tensor:
        """The rows of x (rows, m) that `times` takes, in fp32."""
        index = self.order if self.padded is None else self.padded
        return (x if index is None else x.index_select(0, index)).float()

    def times(self, gathered: Tensor, factors: Tensor) -> Tensor:
        """Each gathered row times its slot's factor, of factors (slots, 1, n, m)."""
        if self.order is None:
            return gathered @ factors[self.slots[0], 0].float().T
        width = factors.shape[2]
        if self.padded is not None:
            chosen = factors[list(self.slots), 0].float().transpose(1, 2)
            return torch.bmm(gathered.view(len(chosen), -1, factors.shape[3]), chosen).flatten(0, 1)
        products = gathered.new_empty(len(gathered), width)
        for slot, part in zip(self.slots, self.parts, strict=True):
            torch.mm(gathered[part], factors[slot, 0].float().T, out=products[part])
        return products

    def scatter(self, products: Tensor, count: int) -> Tensor:
        """Put them back into `count` rows; those without an adapter are 0."""
        if self.order is None:
            return products
        if self.positions is not None:
            products = products.index_select(0, self.positions)
        return products.new_zeros(count, products.shape[1]).index_copy_(0, self.order, products)


class GroupedLoraCPU(PunicaWrapperCPU):
    """Takes the place of `PunicaWrapperCPU` in a running engine."""

    _rows: Rows

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self.regroup()

    def regroup(self) -> None:
        """Note which rows of the batch belong to which slot."""
        self._rows = Rows.of(self.token_lora_indices)

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """y += scale * x A^T B^T for each slice of y's columns and each row's slot.

        Args:
            y: (tokens, sum of `output_slices`).
            x: (tokens, in).
            lora_a_stacked: a slice's are (slots, 1, rank, in).
            lora_b_stacked: a slice's are (slots, 1, out, rank).
        """
        if not self._rows.slots:
            return
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        gathered, begin = self._rows.gather(x), 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            change = self._rows.times(scale * self._rows.times(gathered, a), b)
            y[:, begin : begin + width] += self._rows.scatter(change, len(x)).to(y.dtype)
            begin += width

    def _apply_shrink(self, y: Tensor, x: Tensor, w_t_all: Tensor, scale: float) -> None:
        """y = scale * x A^T, where vLLM splits the ranks of factors over workers."""
        if self._rows.slots:
            product = self._rows.times(self._rows.gather(x), w_t_all)
            y[:, : product.shape[1]] = scale * self._rows.scatter(product, len(x))

    def _apply_expand(
        self,
        y: Tensor,
        x: Tensor,
        w_t_all: Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        """y's slice (+)= x B^T, likewise."""
        if not self._rows.slots:
            return
        product = self._rows.times(self._rows.gather(x), w_t_all)
        change = self._rows.scatter(product, len(x)).to(y.dtype)
        columns = y[:, y_offset : y_offset + y_slice_size]
        if add_inputs:
            columns += change
        else:
            columns.copy_(change)

    def add_lora_embedding(self, *args: Any, **kwargs: Any) -> None:
        """Without effect: no adapter of the embedding is let in."""

    def add_lora_logits(self, *args: Any, **kwargs: Any) -> None:
        """Without effect: no adapter of the output layer is let in.

        vLLM calls this with a prompt's rows too, when it scores one, and the batch's slots do not
        describe these.
        """


def install(manager: LoRAModelManager) -> bool:
    """Replace the CPU wrappers of a loaded model; whether there were any."""
    if not vllm.__version__.startswith(_WRITTEN_FOR):
        return False
    found = [w for w in manager.punica_wrapper_mapping.values() if type(w) is PunicaWrapperCPU]
    for wrapper in found:
        wrapper.__class__ = GroupedLoraCPU
        wrapper.indices_len[0] = wrapper.indices_len[0] or 0
        wrapper.regroup()  # type: ignore[attr-defined]
    return bool(found)
