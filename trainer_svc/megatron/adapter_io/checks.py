"""Whether a stored adapter is the one that the settings describe, before any of it is taken."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from common.adapter import LoraConfig, Manifest
from common.errors import Incompatible
from trainer_svc.megatron.adapter_io.places import Piece, Pieces, Place
from trainer_svc.megatron.lora.pair import A
from trainer_svc.megatron.lora.plan import AdapterPlan, Pair, Site


def check_fits(
    path: Path,
    manifest: Manifest,
    tensors: Mapping[str, Tensor],
    *,
    plan: AdapterPlan,
    pieces: Pieces,
) -> None:
    """Every rank checks the whole of it, so that all of them raise the same.

    Raises:
        Incompatible: type, rank, scale, modules or shapes differ, or what is one factor in the
            model is not the same for all modules that it stands for.
    """
    lora = manifest.lora
    assert lora is not None
    _check_type(path, lora, plan)
    _check_names(path, tensors, pieces)
    _check_finite(path, tensors)
    for (site, pair, leaf), of_leaf in pieces.items():
        for piece in of_leaf:
            if leaf == A:
                _check_scale(path, lora, piece.places, plan.sites[site].pairs[pair])
            _check_shapes(path, piece.places, tensors)
            _check_shared(path, plan, plan.sites[site], piece, tensors)


def _check_type(path: Path, lora: LoraConfig, plan: AdapterPlan) -> None:
    if lora.use_dora != (plan.settings.type == "dora"):
        found = "dora" if lora.use_dora else "lora or canonical_lora"
        raise Incompatible(
            f"{path}: the adapter's type is {found}, lora.type is {plan.settings.type}; "
            "set lora.type to match"
        )


def _check_names(path: Path, tensors: Mapping[str, Tensor], pieces: Pieces) -> None:
    wanted = {
        place.name for of_leaf in pieces.values() for piece in of_leaf for place in piece.places
    }
    if odd := sorted(wanted ^ tensors.keys()):
        side = "lacks" if odd[0] in wanted else "has the unknown"
        raise Incompatible(
            f"{path}: the adapter {side} {odd[0]} ({len(odd)} names differ); "
            "set lora.target_modules to match"
        )


def _check_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise Incompatible(
                f"{path}: {name} has elements that are not finite, so no update could change them; "
                "use an adapter from before"
            )


def _check_scale(path: Path, lora: LoraConfig, places: tuple[Place, ...], pair: Pair) -> None:
    for module in (place.read_name.parameter for place in places):
        rank, scale = lora.rank_of(module), lora.scale_of(module)
        if rank != pair.rank or not math.isclose(scale, pair.scale, rel_tol=1e-9):
            raise Incompatible(
                f"{path}: {module} has rank {rank} and scale {scale}, the settings {pair.rank} and "
                f"{pair.scale}; set lora.rank and lora.alpha, or their patterns, to match"
            )


def _check_shapes(path: Path, places: tuple[Place, ...], tensors: Mapping[str, Tensor]) -> None:
    for place in places:
        found = tuple(tensors[place.name].shape)
        if found != place.shape:
            raise Incompatible(
                f"{path}: {place.name} has shape {found}, the model {place.shape}; "
                "use an adapter of this base model"
            )


def _check_shared(
    path: Path, plan: AdapterPlan, site: Site, piece: Piece, tensors: Mapping[str, Tensor]
) -> None:
    first, *others = piece.places
    value = first.view(tensors[first.name])
    for other in others:
        if not torch.equal(value, other.view(tensors[other.name])):
            one, two = (_called(place) for place in (first, other))
            raise Incompatible(
                f"{path}: {one} and {two} differ in {first.read_name.own_name}, but have one "
                f"here; {_way_out(plan, site)}"
            )


def _called(place: Place) -> str:
    """What users know it as; of a tensor of all experts, which expert."""
    module = place.read_name.module
    return module if place.num_experts == 1 else f"expert {place.expert} of {module}"


def _way_out(plan: AdapterPlan, site: Site) -> str:
    if site.linear.is_expert and site.expert is None:
        return 'set lora.experts = "per_expert"'
    if plan.settings.type == "dora":
        return "DoRA has one A for all projections of a fused linear, so train it from scratch"
    return 'set lora.type = "canonical_lora"'
