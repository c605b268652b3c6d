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

_WRITTEN_FOR = "0.32."
"""Short of a whole platform plugin vLLM has no hook for this, so it is tied to one release."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of a batch belong to which slot.

    `order` has those with an adapter, slot after slot, and `parts` where in it each slot's lie; no
    order: all rows are one slot's.
    """

    parts: tuple[tuple[int, slice], ...]
    order: Tensor | None

    @classmethod
    def of(cls, slots: Tensor) -> Rows:
        """Of each row's slot."""
        used, counts = torch.unique(slots, return_counts=True)
        if used.tolist() == [_NO_ADAPTER] or not len(used):
            return cls((), None)
        if len(used) == 1:
            return cls(((int(used), slice(0, len(slots))),), None)
        order = torch.argsort(slots, stable=True)
        without = int(counts[0]) if used[0] == _NO_ADAPTER else 0
        parts, begin = [], 0
        for slot, count in zip(used.tolist(), counts.tolist(), strict=True):
            if slot != _NO_ADAPTER:
                parts.append((slot, slice(begin, begin + count)))
                begin += count
        return cls(tuple(parts), order[without:])

    def times(self, x: Tensor, factors: Tensor) -> Tensor:
        """Each row of x times its slot's factor, 0 where it has none, in fp32: (rows, n).

        Args:
            x: (rows, m).
            factors: (slots, 1, n, m).
        """
        if self.order is None:
            ((slot, _),) = self.parts
            return x.float() @ factors[slot, 0].float().T
        # One gather and one scatter, however many slots: they cost more than the products.
        gathered = x.index_select(0, self.order).float()
        products = gathered.new_empty(len(gathered), factors.shape[2])
        for slot, part in self.parts:
            torch.mm(gathered[part], factors[slot, 0].float().T, out=products[part])
        return products.new_zeros(len(x), factors.shape[2]).index_copy_(0, self.order, products)


class GroupedLoraCPU(PunicaWrapperCPU):
    """Takes the place of `PunicaWrapperCPU` in a running engine."""

    _rows: Rows

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self.regroup()

    def regroup(self) -> None:
        """Note which rows of the batch belong to which slot; once a step, not once a layer."""
        self._rows = Rows.of(self.token_lora_indices)

    def _apply_shrink(self, y: Tensor, x: Tensor, w_t_all: Tensor, scale: float) -> None:
        """y = scale * x A^T per slot; x (tokens, in), w_t_all (slots, 1, rank, in)."""
        if self._rows.parts:
            y[:, : w_t_all.shape[2]] = scale * self._rows.times(x, w_t_all)

    def _apply_expand(
        self,
        y: Tensor,
        x: Tensor,
        w_t_all: Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        """y's slice (+)= x B^T per slot; x (tokens, rank), w_t_all (slots, 1, out, rank)."""
        if not self._rows.parts:
            return
        change = self._rows.times(x, w_t_all).to(y.dtype)
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
