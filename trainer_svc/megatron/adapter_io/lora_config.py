"""The configuration that goes with an exported adapter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from common.adapter import LoraConfig
from common.peft_names import EXPERTS
from trainer_svc.megatron.adapter_io.places import Pieces
from trainer_svc.megatron.lora.pair import A
from trainer_svc.megatron.lora.plan import AdapterPlan, Pair

N = TypeVar("N", int, float)


def exact_config(plan: AdapterPlan, pieces: Pieces) -> LoraConfig:
    """Every module with the rank and alpha it is trained with, as PEFT's patterns say it."""
    settings = plan.settings
    modules = dict(_modules(plan, pieces))
    ranks = {module: pair.rank for module, pair in modules.items()}
    alphas = {module: pair.alpha for module, pair in modules.items()}
    return LoraConfig(
        rank=settings.rank,
        alpha=settings.alpha,
        target_modules=_target_modules(pieces),
        use_rslora=settings.use_rslora,
        use_dora=settings.type == "dora",
        rank_pattern=_pattern(ranks, default=settings.rank),
        alpha_pattern=_pattern(alphas, default=settings.alpha),
    )


def _pattern(values: Mapping[str, N], *, default: N) -> tuple[tuple[str, N], ...]:
    """PEFT's pattern for values by module: by last name where all modules of it agree."""
    by_own_name: dict[str, dict[str, N]] = {}
    for module, value in values.items():
        by_own_name.setdefault(module.rpartition(".")[2], {})[module] = value
    pattern: dict[str, N] = {}
    for own_name, modules in by_own_name.items():
        if set(modules.values()) == {default}:
            continue
        agree = len(set(modules.values())) == 1
        odd = {module: value for module, value in modules.items() if value != default}
        pattern |= {own_name: next(iter(odd.values()))} if agree else odd
    return tuple(pattern.items())


def uniform_config(plan: AdapterPlan, pieces: Pieces) -> LoraConfig:
    """One rank, the largest, and one scale, that of a module without patterns.

    An engine that knows only one scale an adapter serves it, once every B is multiplied by
    `scale_ratio`.
    """
    exact = exact_config(plan, pieces)
    rank = max(pair.rank for _, _, pair in plan.pairs())
    alpha = exact.alpha
    if rank != exact.rank:
        alpha = exact.scale * (math.sqrt(rank) if exact.use_rslora else rank)
    return replace(exact, rank=rank, alpha=alpha, rank_pattern=(), alpha_pattern=())


def scale_ratio(plan: AdapterPlan, pair: Pair) -> float:
    """A pair's scale in terms of `uniform_config`'s."""
    plain = replace(pair, rank=plan.settings.rank, alpha=plan.settings.alpha)
    return pair.scale / plain.scale


def _modules(plan: AdapterPlan, pieces: Pieces) -> Iterator[tuple[str, Pair]]:
    """Every module of PEFT's, by the name that its patterns see, and its pair."""
    for (site, pair, leaf), of_leaf in pieces.items():
        if leaf == A:
            for place in of_leaf[0].places:
                yield place.read_name.parameter, plan.sites[site].pairs[pair]


def _target_modules(pieces: Pieces) -> tuple[str, ...]:
    """Last names of the modules; that of all experts' where one tensor holds them all."""
    names = set()
    for of_leaf in pieces.values():
        for place in (place for piece in of_leaf for place in piece.places):
            own = place.read_name.module.rpartition(".")[2]
            names.add(EXPERTS if place.num_experts > 1 else own)
    return tuple(sorted(names))
