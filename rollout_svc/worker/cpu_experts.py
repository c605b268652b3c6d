"""Experts on a CPU: vLLM packs their weights when it first loads them, and at no later time.

vLLM 0.32 takes a kernel that is there for a sign that weights of the same layout follow, which
holds on accelerators alone: experts that are reloaded on a CPU would be read as if packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import vllm
from torch.nn import Module
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.platforms import current_platform

_WRITTEN_FOR = "0.32."
"""vLLM has no hook for this, so it is tied to one release."""


@contextmanager
def repacked(modules: Iterable[Module]) -> Iterator[None]:
    """Have the experts among `modules` packed anew where they are loaded in this block."""
    kernels = {}
    if current_platform.is_cpu() and vllm.__version__.startswith(_WRITTEN_FOR):
        methods = [m.quant_method for m in modules if isinstance(m, RoutedExperts)]
        kernels = {method: method.moe_kernel for method in methods}
    for method in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels.items():
            if method.moe_kernel is None:
                method.moe_kernel = kernel
