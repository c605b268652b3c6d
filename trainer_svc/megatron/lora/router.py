"""An adapter on the router of a mixture of experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trainer_svc.megatron.lora.linear import LoraLinear


class LoraRouter(LoraLinear):
    """A frozen Megatron router whose logits the adapter changes, in the router's own type."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.base.gating = self._gating  # type: ignore[assignment]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """What the router makes of x (seq, batch, hidden): weights and choice."""
        routed: tuple[Tensor, Tensor | None] = self.base(x, *args, **kwargs)
        return routed

    def _gating(self, x: Tensor) -> Tensor:
        base: Any = self.base
        logits: Tensor = type(base).gating(base, x)
        return logits if self.active is None else self.adapted(x, logits)
