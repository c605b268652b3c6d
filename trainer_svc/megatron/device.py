"""All that Megatron-core needs to run without CUDA; nothing here acts where CUDA exists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

HAVE_CUDA = torch.cuda.is_available()

BACKEND = "nccl" if HAVE_CUDA else "gloo"
"""Collective backend of the tensors' device."""


def compute_device() -> torch.device:
    """Device that this rank computes on."""
    return torch.device("cuda", torch.cuda.current_device()) if HAVE_CUDA else torch.device("cpu")


def answer_for_cuda() -> None:
    """Answer what Megatron asks CUDA for on CPU paths too: the device, and to wait for it."""
    if HAVE_CUDA:
        return
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None


def cuda_is_cpu() -> AbstractContextManager[object]:
    """For the time of a `with` block, a tensor made on "cuda" is made on the CPU.

    Megatron's pipeline schedules name that device outright.
    """
    return nullcontext() if HAVE_CUDA else _OnCpu()


class _OnCpu(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if kwargs and kwargs.get("device") == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **(kwargs or {}))
