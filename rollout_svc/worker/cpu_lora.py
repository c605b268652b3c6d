"""LoRA arithmetic on a CPU: vLLM's own is wrong for mixed batches, and slow.

vLLM 0.32 marks a token without adapter by slot -1 and then indexes with it, so that a base request
beside an adapter's is answered with the last slot's adapter. It also gathers a copy of both factors
for every token. Here the tokens of one slot are one matrix product over all of a layer's slices,
and slot -1 is left alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import vllm
from torch import Tensor
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager

_NO_ADAPTER = -1

_FEW_ROWS = 64
"""Up to so many, every row times every slot's factors costs less than picking each slot's rows."""

_WRITTEN_FOR = "0.32."
"""Short of a whole platform plugin vLLM has no hook for this, so it is tied to one release."""


class Packed(tuple[Tensor, ...]):
    """A layer's factors, one for each of its slices, as parts of one matrix a slot."""

    whole: Tensor

    @classmethod
    def a(cls, factors: Sequence[Tensor]) -> Packed:
        """Of (slots, 1, rank, in) each; `whole` is (slots, sum of ranks, in)."""
        whole = torch.cat([factor.squeeze(1) for factor in factors], dim=1)
        ranks = [factor.shape[2] for factor in factors]
        return cls._of(whole, torch.split(whole, ranks, dim=1))

    @classmethod
    def b(cls, factors: Sequence[Tensor]) -> Packed:
        """Of (slots, 1, out, rank) each; `whole` is (slots, sum of outs, sum of ranks), and 0 where
        a slice's outputs meet another's rank."""
        outs, ranks = ([factor.shape[dim] for factor in factors] for dim in (2, 3))
        whole = factors[0].new_zeros(len(factors[0]), sum(outs), sum(ranks))
        rows = torch.split(whole, outs, dim=1)
        parts = [torch.split(row, ranks, dim=2)[index] for index, row in enumerate(rows)]
        for part, factor in zip(parts, factors, strict=True):
            part.copy_(factor.squeeze(1))
        return cls._of(whole, parts)

    @classmethod
    def _of(cls, whole: Tensor, parts: Iterable[Tensor]) -> Packed:
        packed = cls(part.unsqueeze(1) for part in parts)
        packed.whole = whole
        return packed


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of a batch belong to which slot, worked out once a step for all its layers.

        rows = Rows.of(torch.tensor([1, -1, 0, 1]))
        y += rows.times(x, a, b)

    Args:
        slots: those in use.
        masks: for each slot (rows, 1), 1 in its own rows; empty where all are of the one slot.
        own: for each slot its rows, instead of masks, where there are many.
    """

    slots: tuple[int, ...]
    masks: tuple[Tensor, ...] = ()
    own: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, slots: Tensor) -> Rows:
        """Of each row's slot."""
        used = torch.unique(slots).tolist()
        names = tuple(slot for slot in used if slot != _NO_ADAPTER)
        if len(used) < 2:
            return cls(names)
        belongs = [slots == name for name in names]
        if len(slots) <= _FEW_ROWS:
            return cls(names, masks=tuple(own.float().unsqueeze(1) for own in belongs))
        return cls(names, own=tuple(own.nonzero().squeeze(1) for own in belongs))

    def times(self, x: Tensor, first: Tensor, *others: Tensor) -> Tensor:
        """Each row of x (rows, m) times its slot's factors, of (slots, n, m) each, one after the
        other; in fp32, and 0 in rows without a slot."""
        x, width = x.float(), (first, *others)[-1].shape[1]
        if self.own:
            change = x.new_zeros(len(x), width)
            for slot, own in zip(self.slots, self.own, strict=True):
                change[own] = _through(x[own] @ first[slot].float().T, slot, others)
            return change
        products = [x @ first[slot].float().T for slot in self.slots]
        for product, mask in zip(products, self.masks, strict=False):
            product *= mask
        changes = map(_through, products, self.slots, itertools.repeat(others))
        return functools.reduce(Tensor.add_, changes)


def _through(x: Tensor, slot: int, factors: Iterable[Tensor]) -> Tensor:
    for factor in factors:
        x = x @ factor[slot].float().T
    return x


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
        """
        if self._rows.slots:
            assert isinstance(lora_a_stacked, Packed) and isinstance(lora_b_stacked, Packed)
            y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
            change = self._rows.times(x, lora_a_stacked.whole, lora_b_stacked.whole)
            y += change if scale == 1 else change.mul_(scale)

    def _apply_shrink(self, y: Tensor, x: Tensor, w_t_all: Tensor, scale: float) -> None:
        """y = scale * x A^T, where vLLM splits the ranks of factors over workers."""
        if self._rows.slots:
            product = self._rows.times(x, w_t_all.squeeze(1))
            y[:, : product.shape[1]] = scale * product

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
        change = self._rows.times(x, w_t_all.squeeze(1))
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
    """Replace the CPU wrappers of a loaded model, and pack its slots; whether there were any."""
    if not vllm.__version__.startswith(_WRITTEN_FOR):
        return False
    found = [w for w in manager.punica_wrapper_mapping.values() if type(w) is PunicaWrapperCPU]
    for wrapper in found:
        wrapper.__class__ = GroupedLoraCPU
        wrapper.indices_len[0] = wrapper.indices_len[0] or 0
        wrapper.regroup()  # type: ignore[attr-defined]
    for module in manager.modules.values() if found else ():
        if isinstance(module, BaseLinearLayerWithLoRA):
            module.lora_a_stacked = Packed.a(module.lora_a_stacked)
            module.lora_b_stacked = Packed.b(module.lora_b_stacked)
    return bool(found)
