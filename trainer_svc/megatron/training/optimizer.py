"""AdamW (arXiv 1711.05101) on float32 masters, with clipped gradients and a linear warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer_svc.megatron import parallel
from trainer_svc.megatron.lora.layers import LoraLinear
from trainer_svc.megatron.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer update did; `grad_norm` is that before clipping."""

    grad_norm: float
    lr: float
    skipped: bool


class AdapterOptimizer:
    """Updates the A and B of some adapters from their gradients.

    A float32 parameter is its own master; a narrower one follows its master by one rounding.
    """

    def __init__(self, modules: Sequence[LoraLinear], *, settings: TrainSettings) -> None:
        self._settings = settings
        self._sharded = [m.sharded for m in modules]
        self._parameters = [p for m in modules for p in (m.lora_a, m.lora_b)]
        self._masters = [_master(p) for p in self._parameters]
        self._adam = torch.optim.AdamW(
            self._masters,
            lr=settings.lr,
            **_hyperparameters(settings),
        )
        self.updates = 0

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        warm = self._settings.warmup_updates
        return self._settings.lr * min(1.0, (self.updates + 1) / (warm + 1))

    def step(self) -> Update:
        """Sum gradients over the data-parallel ranks, clip, update, and drop the gradients.

        A gradient that is not finite changes nothing: it would ruin the adapter for good.
        """
        gradients = [_gradient(p) for p in self._parameters]
        parallel.sum_dp(gradients)
        norm = self._norm(gradients)
        lr = self.lr
        finite = bool(norm.isfinite())
        if finite:
            scale = (self._settings.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            self._apply([gradient * scale for gradient in gradients], lr=lr)
        for parameter in self._parameters:
            parameter.grad = None
        return Update(grad_norm=float(norm), lr=lr, skipped=not finite)

    def state_dict(self) -> dict[str, Any]:
        """This rank's moments, masters and number of updates."""
        return {
            "adam": self._adam.state_dict(),
            "masters": [m.detach() for m in self._masters],
            "updates": self.updates,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict` under the current settings; parameters follow the masters."""
        self._adam.load_state_dict(state["adam"])
        for group in self._adam.param_groups:
            group.update(_hyperparameters(self._settings))
        self.updates = state["updates"]
        for master, value in zip(self._masters, state["masters"], strict=True):
            master.copy_(value)
        self.refresh_parameters()

    @torch.no_grad()
    def refresh_parameters(self) -> None:
        """Let the parameters follow the masters."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            parameter.copy_(master)

    def _apply(self, gradients: Sequence[Tensor], *, lr: float) -> None:
        for master, gradient in zip(self._masters, gradients, strict=True):
            master.grad = gradient
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self._adam.zero_grad()
        self.refresh_parameters()
        self.updates += 1

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """L2 norm over the whole adapter: sharded parts add up over ranks, others count once."""
        sharded = {id(parameter) for parameter in self._sharded}
        pairs = list(zip(self._parameters, gradients, strict=True))
        own = torch.stack([g.square().sum() for p, g in pairs if id(p) in sharded]).sum()
        whole = torch.stack([g.square().sum() for p, g in pairs if id(p) not in sharded]).sum()
        return (parallel.sum_tp(own) + whole).sqrt()


def _hyperparameters(settings: TrainSettings) -> dict[str, Any]:
    """What AdamW keeps in its state beside the learning rate, which every update sets."""
    return {
        "betas": settings.betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }


def _master(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype is torch.float32:
        return parameter
    return parameter.detach().float().requires_grad_(True)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Float32 gradient; zeros where this rank saw no sample."""
    if parameter.grad is None:
        return torch.zeros_like(parameter, dtype=torch.float32)
    return parameter.grad.float()
