"""LoRA arithmetic on a CPU: vLLM's own is wrong for mixed batches, and slow.

vLLM 0.32 marks a token without adapter by slot -1 and then indexes with it, so that a base request
beside an adapter's is answered with the last slot's adapter. It also gathers a copy of both factors
for every token. Here the tokens of one slot are one matrix product, and slot -1 is left alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import vllm
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager

_NO_ADAPTER = -1
Groups: TypeAlias = "tuple[tuple[int, slice | Tensor], ...]"
"""Slots of a batch and the rows that belong to each."""

_WRITTEN_FOR = "0.32."
"""Short of a whole platform plugin vLLM has no hook for this, so it is tied to one release."""


class GroupedLoraCPU(PunicaWrapperCPU):
    """Takes the place of `PunicaWrapperCPU` in a running engine."""

    _groups: Groups
    _sampled: Groups

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self.regroup()

    def regroup(self) -> None:
        """Note which rows of the batch belong to which slot; once a step, not once a layer."""
        self._groups = _grouped(self.token_lora_indices)
        self._sampled = _grouped(self.sampler_indices)

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

    def add_lora_logits(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Tensor,
        lora_b_stacked: Tensor,
        scale: float,
        **kwargs: Any,
    ) -> None:
        """y += scale * x A^T B^T for the rows that are sampled from; y (rows, vocab).

        Only where the output layer is adapted: when it scores a prompt, vLLM calls this with the
        prompt's rows, which the batch's grouping does not describe.
        """
        for slot, rows in self._sampled:
            a, b = lora_a_stacked[slot, 0].float(), lora_b_stacked[slot, 0].float()
            if not a.any():
                continue
            y[rows, : b.shape[0]] += (scale * (x[rows].float() @ a.T) @ b.T).to(y.dtype)


def _grouped(slots: Tensor) -> Groups:
    """The slots in use and each one's rows; a slice, which copies nothing, for the only one."""
    used = sorted(set(slots.tolist()))
    if used == [_NO_ADAPTER] or not used:
        return ()
    if len(used) == 1:
        return ((used[0], slice(0, len(slots))),)
    return tuple(
        (slot, torch.nonzero(slots == slot).squeeze(1)) for slot in used if slot != _NO_ADAPTER
    )


def install(manager: LoRAModelManager) -> bool:
    """Replace the CPU wrappers of a loaded model; whether there were any."""
    if not vllm.__version__.startswith(_WRITTEN_FOR):
        return False
    found = [w for w in manager.punica_wrapper_mapping.values() if type(w) is PunicaWrapperCPU]
    for wrapper in found:
        wrapper.__class__ = GroupedLoraCPU
        wrapper.indices_len[:2] = (length or 0 for length in wrapper.indices_len[:2])
        wrapper.regroup()  # type: ignore[attr-defined]
    return bool(found)
