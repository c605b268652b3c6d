"""Adapters in a model: put there as the plan says, and walked in its order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import nn

from trainer_svc.megatron.lora.init import start_values
from trainer_svc.megatron.lora.linear import LoraLinear
from trainer_svc.megatron.lora.merge import merged_weight
from trainer_svc.megatron.lora.pair import LoraPair
from trainer_svc.megatron.lora.plan import AdapterPlan, Site
from trainer_svc.megatron.lora.router import LoraRouter
from trainer_svc.megatron.lora.settings import LoraSettings
from trainer_svc.megatron.lora.targets import ROUTER
from trainer_svc.megatron.lora.tensors import (
    TrainedTensor,
    lora_linears,
    trained_tensors,
    wrapped_linears,
)
from trainer_svc.megatron.model.shard import Shard

if TYPE_CHECKING:
    from trainer_svc.megatron.model.build import BaseModel

__all__ = [
    "LoraLinear",
    "LoraPair",
    "Shard",
    "TrainedTensor",
    "add_lora",
    "lora_linears",
    "merged_weight",
    "trained_tensors",
    "wrapped_linears",
]


def add_lora(base: BaseModel, *, plan: AdapterPlan, seed: int) -> None:
    """Put the plan's adapters on this rank's part of the model, in place; they are all that trains.

    The start values depend on the seed and on the names alone, so they are the same at every
    parallel layout. Every rank must call this.
    """
    layers = _layers(base.chunks)
    for number, site in enumerate(plan.sites):
        if site.layer in layers:
            wrapped = _wrap(base, layers[site.layer], number=number, plan=plan)
            if wrapped is not None:
                start_values(wrapped, settings=plan.settings, seed=seed)


def _layers(chunks: Sequence[GPTModel]) -> dict[int, nn.Module]:
    """This rank's layers by their number in the whole model."""
    for chunk in chunks:
        chunk.requires_grad_(False)
    return {layer.layer_number - 1: layer for chunk in chunks for layer in chunk.decoder.layers}


def _wrap(
    model: BaseModel, layer: nn.Module, *, number: int, plan: AdapterPlan
) -> LoraLinear | None:
    """Wrap what this rank holds of a site, and give one of it; None of another rank's expert."""
    site = plan.sites[number]
    held = _held(layer, site)
    if not held:
        return None
    kind = LoraRouter if site.linear.own_name == ROUTER else LoraLinear
    pairs = _pairs(site, plan.settings, layer.get_submodule(held[0][1]))
    adapters = nn.ModuleDict({"default": pairs})
    for expert, name in held:
        wrapped = kind(
            layer.get_submodule(name),
            site=site,
            site_number=number,
            expert=expert,
            heads=model.config.heads,
            settings=plan.settings,
            adapters=adapters,
        )
        parent, _, own = name.rpartition(".")
        setattr(layer.get_submodule(parent), own, wrapped)
    return wrapped


def _held(layer: nn.Module, site: Site) -> list[tuple[int | None, str]]:
    """(expert in the whole model, own name in the layer) of each of a site's linears here."""
    name = site.linear.name
    if not site.linear.is_expert:
        return [(None, name)]
    experts = layer.get_submodule(name.partition(".{expert}")[0])
    assert isinstance(experts, nn.ModuleList)
    first = parallel_state.get_expert_model_parallel_rank() * len(experts)
    here = [(first + local, name.format(expert=local)) for local in range(len(experts))]
    return [(e, local) for e, local in here if site.expert in (None, e)]


def _pairs(site: Site, settings: LoraSettings, base: nn.Module) -> nn.ModuleList:
    dtype = getattr(torch, settings.dtype)
    has_magnitude = settings.type == "dora"
    pairs = [LoraPair(site, p, has_magnitude=has_magnitude, dtype=dtype) for p in site.pairs]
    device = next(base.parameters()).device
    return nn.ModuleList(pairs).to(device)
