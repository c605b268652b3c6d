"""Inside a vLLM worker: other weights in the place of those that are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from rollout_svc.worker.cpu_experts import repacked
from rollout_svc.worker.cpu_head import forget_heads
from rollout_svc.worker.live_names import live_names
from rollout_svc.worker.weight_files import WeightFiles


def find_places(model: Any, path: Path) -> tuple[set[str], list[str], list[str]]:
    """Parameters that the model's tensors fill, tensors that fill none, parameters left empty."""
    places = live_names(model, WeightFiles.of_model(path))
    filled = {place for place in places.values() if place}
    unbound = [name for name, place in places.items() if place is None]
    return filled, unbound, sorted({name for name, _ in model.named_parameters()} - filled)


def load(runner: Any, path: Path) -> None:
    """By vLLM's own reload, which packs, splits over ranks and repacks as at the start.

    It takes Hugging Face's names, those of wrapped linears too.
    """
    model = runner.get_model()
    forget_heads(model)
    with repacked(model.modules()):
        try:
            runner.reload_weights(weights_iterator=WeightFiles.of_model(path).items())
        except Exception:
            _discard(model.modules())
            finalize_layerwise_reload(model, runner.model_config)  # type: ignore[no-untyped-call]
            raise


def load_into(
    runner: Any, modules: Sequence[Module], weights: Iterable[tuple[str, Tensor]]
) -> None:
    """The same for some modules; `weights` are all of theirs, and of no others."""
    with repacked(modules):
        for module in modules:
            initialize_layerwise_reload(module)
        try:
            runner.get_model().load_weights(weights)
        except Exception:
            _discard(modules)
            raise
        finally:
            for module in modules:
                finalize_layerwise_reload(module, runner.model_config)  # type: ignore[no-untyped-call]


def _discard(modules: Iterable[Module]) -> None:
    """Of a reload that failed, which vLLM leaves open: what it has not put into a module yet.

    Once it is finalized, those modules have what they had, and the next reload begins anew.
    """
    for info in map(get_layerwise_info, modules):
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()
