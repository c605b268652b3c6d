"""The output layer in fp32 on a CPU: vLLM casts its whole weight anew at every step.

For a small model that is half of the step. On CUDA vLLM multiplies into fp32 without a cast.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import Module
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.logits_processor import LogitsProcessor


@PluggableLayer.register_oot(name="LogitsProcessor")
class KeptHead(LogitsProcessor):
    """Takes the place of `LogitsProcessor` in every model that is built after this import."""

    _kept: tuple[Module, SimpleNamespace] | None = None

    def _apply_head(
        self, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None
    ) -> Tensor:
        if hidden_states.is_cpu and self.head_dtype not in (None, hidden_states.dtype):
            lm_head = self._cast(lm_head)
        return super()._apply_head(lm_head, hidden_states, embedding_bias)

    def _cast(self, lm_head: Any) -> SimpleNamespace:
        if self._kept is None or self._kept[0] is not lm_head:
            weight = lm_head.weight.to(self.head_dtype)
            cast = SimpleNamespace(weight=weight, quant_method=lm_head.quant_method)
            self._kept = lm_head, cast
        return self._kept[1]

    def forget(self) -> None:
        """The weights were replaced."""
        self._kept = None


def forget_heads(model: Module) -> None:
    """Call after other weights were loaded into the output layer."""
    for module in model.modules():
        if isinstance(module, KeptHead):
            module.forget()
