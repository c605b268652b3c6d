"""Runs inside every vLLM worker: loads a version and says which of its tensors found a module.

vLLM looks only at the last part of a tensor's name, and at no shape: an adapter for other layers,
or for a wider model, loads in silence and answers as the base model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from vllm.distributed import get_pp_group
from vllm.lora.layers import LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear

from rollout_svc import cpu_lora, orphans, worker_weights

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager


class RefitWorkerExtension:
    """Mixed into vLLM's worker; its methods are called by `collective_rpc`."""

    model_runner: Any

    def refit_prepare(self, replica_pid: int) -> list[str]:
        """Mend LoRA on a CPU, then name the projections that take an adapter, as PEFT does."""
        orphans.end_with(replica_pid)
        manager = self._refit_manager()
        cpu_lora.install(manager)
        names = set()
        for path, module in manager.modules.items():
            if isinstance(module, LogitsProcessorWithLoRA | VocabParallelEmbeddingWithLoRA):
                continue
            for part in manager.packed_modules.get(path, [path]):
                names.add(part.rpartition(".")[2])
        return sorted(names)

    def refit_load(self, adapter_id: int, name: str, path: str) -> dict[str, Any]:
        """Load, then check; answers a `BoundReport` as a dict."""

        def load() -> tuple[int, list[str]]:
            self.model_runner.add_lora(LoRARequest(name, adapter_id, path))
            manager = self._refit_manager()
            bound, unbound = _bind(manager, manager.get_adapter(adapter_id), Path(path))
            return len(bound), unbound

        return _reported(load)

    def refit_check_weights(self, path: str) -> dict[str, Any]:
        """Whether every tensor of a staged model has a parameter here, and the reverse."""

        def check() -> tuple[int, list[str]]:
            filled, unbound, empty = worker_weights.find_places(
                self.model_runner.get_model(), Path(path)
            )
            if empty:
                raise ValueError(f"no tensor fills {len(empty)} parameters, as {empty[0]}")
            return len(filled), unbound

        return _reported(check)

    def refit_load_weights(self, path: str) -> dict[str, Any]:
        """Load a staged model, or with an empty path what the engine started on."""

        def load() -> tuple[int, list[str]]:
            worker_weights.load(self.model_runner, Path(path) if path else None)
            return 0, []

        return _reported(load)

    def _refit_manager(self) -> LoRAModelManager:
        manager: LoRAModelManager = self.model_runner.lora_manager._adapter_manager
        return manager


def _reported(work: Callable[[], tuple[int, list[str]]]) -> dict[str, Any]:
    """What `work` bound, and what found no place.

    A rank that raises leaves the other ranks' answers in the executor's queues, and every later
    call would read the answer to an earlier one; so an error is an answer too.
    """
    report = {"stage": get_pp_group().rank_in_group, "bound_modules": 0, "unbound": []}
    try:
        bound_modules, unbound = work()
    except Exception as error:  # noqa: BLE001
        return {**report, "error": f"{type(error).__name__}: {error}"}
    return {**report, "bound_modules": bound_modules, "unbound": unbound, "error": ""}


def _bind(
    manager: LoRAModelManager, loaded: LoRAModel | None, path: Path
) -> tuple[set[str], list[str]]:
    """Names of modules that took their tensors, and of tensors that found none, with the reason."""
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    renames = mapper.get_rename_mapper() if mapper is not None else None
    places = {
        part: (whole, index)
        for whole, parts in manager.packed_modules.items()
        for index, part in enumerate(parts)
    }
    bound, unbound = set(), []
    for name, shape in _tensor_shapes(path).items():
        module_name, is_a = parse_fine_tuned_lora_name(name, renames)
        whole, index = places.get(module_name, (module_name, 0))
        reason = _mismatch(manager, loaded, whole, index, shape[1] if is_a else shape[0], is_a)
        if reason:
            unbound.append(f"{name} ({reason})")
        else:
            bound.add(module_name)
    return bound, unbound


def _mismatch(
    manager: LoRAModelManager,
    loaded: LoRAModel | None,
    whole: str,
    index: int,
    width: int,
    is_a: bool,
) -> str:
    module = manager.modules.get(whole)
    if module is None:
        return "the model has no such module"
    weights = loaded.get_lora(whole) if loaded is not None else None
    factors = weights.lora_a if weights is not None else None
    if factors is None or (isinstance(factors, list) and factors[index] is None):
        return "the engine left it out"
    expected = _width(getattr(module, "base_layer", None), index, is_a)
    if expected is not None and width != expected:
        return f"{width} {'in' if is_a else 'out'}_features, the module has {expected}"
    return ""


def _width(base: object, index: int, is_a: bool) -> int | None:
    """Unsharded input or output width of part `index` of a linear layer; None where unknown."""
    if not isinstance(base, LinearBase):
        return None
    if is_a:
        return int(base.input_size)
    if isinstance(base, QKVParallelLinear):
        heads = base.total_num_heads if index == 0 else base.total_num_kv_heads
        return int(heads * (base.v_head_size if index == 2 else base.head_size))
    sizes = getattr(base, "output_sizes", [base.output_size])
    return int(sizes[index]) if index < len(sizes) else None


def _tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(path / "adapter_model.safetensors", framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
