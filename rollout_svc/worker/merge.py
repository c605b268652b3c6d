"""Inside a vLLM worker: an adapter summed into the weights of the modules that it touches."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase

from rollout_svc.engine import Mismatch, MismatchReason
from rollout_svc.worker.live_names import live_names
from rollout_svc.worker.peft_factors import Factors, PeftFactors
from rollout_svc.worker.weight_files import WeightFiles
from rollout_svc.worker.weights import load_into


@dataclass(frozen=True, slots=True)
class Bound:
    """The adapter's modules that have a weight here, by their names in the base model, the tensors
    that have none, and the BLAKE3 in hex of the file that they were read from."""

    modules: tuple[str, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    digest: str = ""


def merge_targets(model: Any) -> list[str]:
    """Projections that an adapter can be summed into, by PEFT's names."""
    packed, names = model.packed_modules_mapping, set[str]()
    for path, module in model.named_modules():
        if isinstance(module, LinearBase):
            own = path.removesuffix(".base_layer").rpartition(".")[2]
            names.update(packed.get(own, (own,)))
        elif isinstance(module, RoutedExperts):
            experts = module.ckpt_gate_proj_name, module.ckpt_up_proj_name
            names.update(filter(None, (*experts, module.ckpt_down_proj_name)))
    return sorted(names)


class Merger:
    """One adapter at a time in a live model's weights, always from the pristine base.

    merger = Merger(runner)
    merger.merge(peft_dir, base=model_dir)
    merger.merge(None, base=model_dir)
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._changed: frozenset[str] = frozenset()
        self._kept: tuple[Path, _Base] | None = None

    def forget(self) -> None:
        """The weights were replaced as a whole."""
        self._changed, self._kept = frozenset(), None

    def check(self, path: Path, *, base: Path) -> Bound:
        """What a merge would bind; nothing changes."""
        return self._base(base).bind(PeftFactors(path))

    def merge(self, path: Path | None, *, base: Path) -> Bound:
        """Sum the adapter's factors in, and put the base's weights back where the last one's were.

        After an error the next merge mends what this one has left.
        """
        pristine, bound, changes = self._base(base), Bound(), dict[str, Factors]()
        if path is not None:
            factors = PeftFactors(path)
            bound = pristine.bind(factors)
            changes = {_weight(module): factors[module] for module in bound.modules}
        touched = pristine.holders(changes)
        self._changed |= touched
        pristine.load(self._runner, self._changed, changes)
        self._changed = touched
        return bound

    def _base(self, path: Path) -> _Base:
        """Kept, for mapping a file anew makes the kernel find each of its pages again."""
        if self._kept is None or self._kept[0] != path:
            self._kept = path, _Base(self._runner.get_model(), path)
        return self._kept[1]


class _Base:
    """The base's weights and where each lives in the model."""

    def __init__(self, model: Any, path: Path) -> None:
        self._model = model
        self._weights = WeightFiles.of_model(path)
        places = live_names(model, self._weights)
        self._places = {name: place for name, place in places.items() if place}
        self._parts: dict[str, list[str]] = {}
        for name, place in self._places.items():
            self._parts.setdefault(_holder(place), []).append(name)

    def holders(self, names: Iterable[str]) -> frozenset[str]:
        """Live modules that hold the base's weights of these names, or parts of which do."""
        return frozenset(_holder(self._places[name]) for name in names)

    def bind(self, factors: PeftFactors) -> Bound:
        """Find a weight of the right shape for every factor."""
        mismatches, modules = factors.strangers(), []
        for module in factors:
            if found := self._mismatches(module, factors):
                mismatches += found
            else:
                modules.append(module)
        return Bound(tuple(modules), tuple(sorted(mismatches)), factors.digest)

    def _mismatches(self, module: str, factors: PeftFactors) -> list[Mismatch]:
        place = self._places.get(_weight(module))
        if place is None:
            return [Mismatch(t, MismatchReason.NO_MODULE) for t in factors.tensors(module)]
        if not isinstance(self._model.get_submodule(_holder(place)), LinearBase | RoutedExperts):
            return [Mismatch(t, MismatchReason.NOT_ADAPTED) for t in factors.tensors(module)]
        return factors.misfits(module, self._weights.shape(_weight(module)))

    def load(self, runner: Any, holders: Collection[str], changes: Mapping[str, Factors]) -> None:
        """Fill live modules with the base's weights, some with factors added."""
        parts = {holder: names for holder, names in self._parts.items() if holder in holders}
        modules = [*map(self._model.get_submodule, parts), *self._attention(parts)]
        names = itertools.chain.from_iterable(parts.values())
        load_into(runner, modules, self._changed(names, changes, runner.device))

    def _changed(
        self, names: Iterable[str], changes: Mapping[str, Factors], device: torch.device
    ) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            weight = self._weights[name]
            if name in changes:
                dtype = self._model.get_parameter(self._places[name]).dtype
                weight = changes[name].add_to(weight, dtype=dtype, device=device)
            yield name, weight

    def _attention(self, holders: Collection[str]) -> list[Module]:
        """Attention beside these modules: multi-head latent attention keeps products of weights."""
        parents = {holder.removesuffix(".base_layer").rpartition(".")[0] for holder in holders}
        return [
            module
            for path, module in self._model.named_modules()
            if is_deferred_attention_layer(module)
            and any(path.startswith(f"{parent}.") for parent in parents)
        ]


def _weight(module: str) -> str:
    return f"{module}.weight"


def _holder(place: str) -> str:
    return place.rpartition(".")[0]
