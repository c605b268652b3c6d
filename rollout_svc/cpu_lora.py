"""LoRA arithmetic on a CPU: vLLM's own is wrong for mixed batches, and slow.

vLLM 0.32 marks a token without adapter by slot -1 and then indexes with it, so that a base request
beside an adapter's is answered with the last slot's adapter. It also gathers a copy of both factors
for every token. Here the tokens of one slot are one matrix product, and slot -1 is left alone.
"""

from __future__ import annotations

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


class GroupedLoraCPU(PunicaWrapperCPU):
    """Takes the place of `PunicaWrapperCPU` in a running engine."""

    _groups: tuple[tuple[int, Any], ...]

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self.regroup()

    def regroup(self) -> None:
        """Note which rows of the batch belong to which slot; once a step, not once a layer."""
        slots = self.token_lora_indices
        used = sorted(set(slots.tolist()) - {_NO_ADAPTER})
        self._groups = tuple((slot, _rows(slots, slot)) for slot in used)

    def _apply_shrink(self, y: Tensor, x: Tensor, w_t_all: Tensor, scale: float) -> None:
        """y = scale * x A^T per slot; x (tokens, in), w_t_all (slots, 1, rank, in)."""
        for slot, rows in self._groups:
            a = w_t_all[slot, 0].float()
            y[rows, : a.shape[0]] = scale * (x[rows].float() @ a.T)

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
        columns = slice(y_offset, y_offset + y_slice_size)
        for slot, rows in self._groups:
            change = (x[rows] @ w_t_all[slot, 0].float().T).to(y.dtype)
            if add_inputs:
                y[rows, columns] += change
            else:
                y[rows, columns] = change


def _rows(slots: Tensor, slot: int) -> slice | Tensor:
    """Rows of one slot; a slice where it has all of them, which is the usual case and no copy."""
    mine = slots == slot
    return slice(0, len(slots)) if bool(mine.all()) else torch.nonzero(mine).squeeze(1)


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
