"""Inside a vLLM worker: which LoRA module of the live model takes each tensor of an adapter.

vLLM looks only at the last part of a tensor's name, and at no shape: an adapter for other layers,
or for a wider model, loads in silence and answers as the base model (vllm#55193).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3
from safetensors import safe_open
from vllm.lora.layers import LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear

from common.peft_dir import WEIGHTS_FILE
from common.peft_names import MAGNITUDE, read_name
from rollout_svc.engine import Mismatch, MismatchReason
from rollout_svc.worker.live_names import live_name

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager

_BASE_LAYER = ".base_layer"
"""PEFT's mark of the first of two parameters of `experts`, in a tensor's name."""


@dataclass(frozen=True, slots=True)
class Place:
    """Part `index` of the packed module `whole` takes the tensors of projection `name`."""

    name: str
    whole: str
    index: int


@dataclass(frozen=True, slots=True)
class Bound:
    """Each tensor has its place, or is a mismatch."""

    places: dict[str, Place]
    mismatches: list[Mismatch]

    @property
    def modules(self) -> set[str]:
        """The projections that took tensors."""
        return {place.name for place in self.places.values()}


def adapted_projections(manager: LoRAModelManager) -> list[str]:
    """Those that take an adapter, as PEFT names them."""
    return sorted(
        {
            part.rpartition(".")[2]
            for whole, module in manager.modules.items()
            if _is_adapted(module)
            for part in manager.packed_modules.get(whole, [whole])
        }
    )


def bind(manager: LoRAModelManager, path: Path) -> Bound:
    """Find the places of a staged adapter's tensors; nothing is loaded."""
    binder = _Binder(manager)
    bound = Bound({}, [])
    with safe_open(path / WEIGHTS_FILE, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            found = binder.find(name, tuple(file.get_slice(name).get_shape()))
            if isinstance(found, Place):
                bound.places[name] = found
            else:
                bound.mismatches.append(found)
    return bound


def digest_of(path: Path) -> str:
    """BLAKE3, in hex, of a staged adapter's file as this rank reads it."""
    return blake3().update_mmap(path / WEIGHTS_FILE).hexdigest()


def left_out(bound: Bound, loaded: LoRAModel | None) -> list[Mismatch]:
    """Tensors that have a place, and that vLLM did not load."""
    return [
        Mismatch(name, MismatchReason.NOT_ADAPTED, "the engine left it out")
        for name, place in bound.places.items()
        if not _has_loaded(loaded, place)
    ]


def _has_loaded(loaded: LoRAModel | None, place: Place) -> bool:
    weights = loaded.get_lora(place.whole) if loaded is not None else None
    factors = weights.lora_a if weights is not None else None
    if place.name == place.whole or not isinstance(factors, list):
        return factors is not None
    # The factors of experts are stacked, and no list of parts.
    return place.index >= len(factors) or factors[place.index] is not None


class _Binder:
    def __init__(self, manager: LoRAModelManager) -> None:
        self._manager = manager
        self._model: Any = manager.model
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        self._renames = mapper.get_rename_mapper() if mapper is not None else None
        self._places = {
            part: Place(part, whole, index)
            for whole, parts in manager.packed_modules.items()
            for index, part in enumerate(parts)
        }

    def find(self, tensor: str, shape: tuple[int, ...]) -> Place | Mismatch:
        parts = read_name(tensor)
        if parts is None:
            return Mismatch(tensor, MismatchReason.KIND, "no factor of a linear layer")
        if parts.leaf == MAGNITUDE:
            return Mismatch(tensor, MismatchReason.KIND, "a LoRA slot takes no DoRA")
        name, is_a = parse_fine_tuned_lora_name(tensor, self._renames)
        name = name.removesuffix(_BASE_LAYER)
        place = self._places.get(name, Place(name, name, 0))
        module = self._manager.modules.get(place.whole)
        if module is None or not _is_adapted(module):
            return Mismatch(tensor, self._why_not(name))
        return self._misfit(tensor, shape, place, is_a) or place

    def _why_not(self, name: str) -> MismatchReason:
        packed = getattr(self._model, "packed_modules_mapping", {})
        there = name in self._live or live_name(f"{name}.weight", self._live, packed)
        return MismatchReason.NOT_ADAPTED if there else MismatchReason.NO_MODULE

    @cached_property
    def _live(self) -> set[str]:
        """Names of the model's modules and parameters; a tied one has several."""
        modules = self._model.named_modules(remove_duplicate=False)
        parameters = self._model.named_parameters(remove_duplicate=False)
        return {name for name, _ in (*modules, *parameters)}

    def _misfit(
        self, tensor: str, shape: tuple[int, ...], place: Place, is_a: bool
    ) -> Mismatch | None:
        base = getattr(self._manager.modules[place.whole], "base_layer", None)
        if not isinstance(base, LinearBase):
            return None
        rank, width = shape if is_a else shape[::-1]
        expected = int(base.input_size) if is_a else _output_width(base, place.index)
        if width != expected:
            side = "in" if is_a else "out"
            detail = f"{width} {side}_features, the module has {expected}"
            return Mismatch(tensor, MismatchReason.SHAPE, detail)
        max_rank = self._manager.lora_config.max_lora_rank
        if rank > max_rank:
            detail = f"rank {rank}, a slot takes up to {max_rank}"
            return Mismatch(tensor, MismatchReason.RANK, detail)
        return None


def _is_adapted(module: object) -> bool:
    """vLLM wraps embedding and output layer too, but adapts neither as PEFT does."""
    return not isinstance(module, LogitsProcessorWithLoRA | VocabParallelEmbeddingWithLoRA)


def _output_width(base: LinearBase, index: int) -> int:
    """Of part `index` of a linear layer, over all tensor-parallel ranks."""
    if isinstance(base, QKVParallelLinear):
        heads = base.total_num_heads if index == 0 else base.total_num_kv_heads
        return int(heads * (base.v_head_size if index == 2 else base.head_size))
    return int(getattr(base, "output_sizes", [base.output_size])[index])
