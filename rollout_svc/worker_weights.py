"""Inside a vLLM worker: a staged model in the place of the one that is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
)

from common.peft_dir import MODEL_FILE
from rollout_svc.live_names import live_name


def find_places(model: Any, path: Path) -> tuple[set[str], list[str], list[str]]:
    """Parameters that the staged tensors fill, tensors that fill none, parameters left empty."""
    live = {name for name, _ in model.named_parameters()}
    packed = getattr(model, "packed_modules_mapping", {})
    with safe_open(path / MODEL_FILE, framework="pt") as file:
        places = {name: live_name(name, live, packed) for name in file.keys()}  # noqa: SIM118
    filled = {place for place in places.values() if place}
    unbound = [name for name, place in places.items() if place is None]
    return filled, unbound, sorted(live - filled)


def load(runner: Any, path: Path | None) -> None:
    """By vLLM's own reload, which packs, splits over ranks and repacks as at the start.

    It takes Hugging Face's names, those of wrapped linears too.
    """
    try:
        runner.reload_weights(weights_iterator=_tensors(path) if path else None)
    except Exception:
        _close(runner)
        raise


def _close(runner: Any) -> None:
    """End a reload that failed, which vLLM leaves open: layers that it has not come to get back
    what they had, and the next reload begins anew."""
    model = runner.get_model()
    for info in map(get_layerwise_info, model.modules()):
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()
    finalize_layerwise_reload(model, runner.model_config)  # type: ignore[no-untyped-call]


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path / MODEL_FILE, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)
