"""The base's weights, which leave the accelerator while nobody computes with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from trainer_svc.megatron.lora.pair import LoraPair

_HOST = torch.device("cpu")


class MovableBase:
    """Moves the parameters that do not train between `device` and the host.

        base = MovableBase(chunks, device=device.compute_device())
        base.offload()
        with base.resident():
            ...

    The parameters stay the same objects, so whatever wraps them stays valid. The weights never
    change: the host's copy is made once, in pinned memory, and is only read from then on. Where the
    host is the device nothing moves.
    """

    def __init__(self, chunks: Sequence[GPTModel], *, device: torch.device) -> None:
        self._device = device
        self._parameters = _frozen(chunks)
        self._on_host: list[Tensor] = []
        self._away = False

    @property
    def size_bytes(self) -> int:
        """Device memory that `offload` frees."""
        return sum(p.numel() * p.element_size() for p in self._parameters)

    def offload(self) -> None:
        """Let the weights lie on the host; without effect where they do."""
        if self._away or self._device == _HOST:
            return
        self._on_host = self._on_host or [_host_copy(p.data) for p in self._parameters]
        for parameter, weights in zip(self._parameters, self._on_host, strict=True):
            parameter.data = weights
        self._away = True
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Bring the weights to the device; without effect where they are there."""
        if not self._away:
            return
        for parameter, weights in zip(self._parameters, self._on_host, strict=True):
            parameter.data = weights.to(self._device, non_blocking=True)
        self._away = False

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Have the weights on the device in a `with` block; after it they are where they were."""
        was_away = self._away
        self.onload()
        try:
            yield
        finally:
            if was_away:
                self.offload()


def _frozen(chunks: Sequence[GPTModel]) -> list[nn.Parameter]:
    """Every parameter outside the adapters, once."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    adapters = {id(p) for m in modules if isinstance(m, LoraPair) for p in m.parameters()}
    own = {id(p): p for chunk in chunks for p in chunk.parameters() if id(p) not in adapters}
    return list(own.values())


def _host_copy(weights: Tensor) -> Tensor:
    host = weights.to(_HOST)
    return host.pin_memory() if weights.is_cuda else host
