"""A rank's random numbers: those of dropout."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer_svc.megatron import device, parallel

_UPDATES_SHIFT = 20


def seed(value: int, *, updates: int = 0) -> None:
    """Start anew; `updates` made so far give other numbers, the same whenever it is called."""
    torch.manual_seed(value + (updates << _UPDATES_SHIFT) + parallel.seed_offset())


def state() -> dict[str, Tensor]:
    """Where this rank's generators are, by device."""
    found = {"cpu": torch.get_rng_state()}
    return found | {"cuda": torch.cuda.get_rng_state()} if device.HAVE_CUDA else found


def set_state(found: Mapping[str, Tensor]) -> None:
    """Inverse of `state`, for the devices that are here."""
    torch.set_rng_state(found["cpu"])
    if "cuda" in found and device.HAVE_CUDA:
        torch.cuda.set_rng_state(found["cuda"])
