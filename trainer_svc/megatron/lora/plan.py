"""What an adapter consists of, from the base's shape and the settings alone; imports no torch.

Every rank makes the same plan of the whole model and wraps, exports, loads and saves in its order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from common.errors import ConfigError
from trainer_svc.megatron.lora.settings import LoraSettings
from trainer_svc.megatron.lora.targets import ROUTER, Target, chosen
from trainer_svc.megatron.model.base_config import BaseConfig
from trainer_svc.megatron.model.linears import Linear, Projection, layer_linears

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class Pair:
    """One A (rank, in_features) and one B (out_features, rank), whole.

    B's rows are those of `projections`, fused as the site's linear fuses them where these are all
    of its projections; a pair of `canonical_lora` has one projection.
    """

    projections: tuple[Projection, ...]
    rank: int
    alpha: float
    use_rslora: bool

    @property
    def out_features(self) -> int:
        return sum(projection.out_features for projection in self.projections)

    @property
    def scale(self) -> float:
        """Factor on B A: alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv 2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


@dataclass(frozen=True, slots=True)
class Site:
    """One linear of the whole model that has an adapter.

    `expert` counts over the whole model; None where the linear is no expert's, and where one
    adapter is shared by all experts of the layer.
    """

    layer: int
    linear: Linear
    expert: int | None
    pairs: tuple[Pair, ...]

    @property
    def name(self) -> str:
        """Unique over the model: Megatron's, but with layer and expert counted over the whole of
        it; a shared adapter has `*` for the expert."""
        expert = "*" if self.expert is None else str(self.expert)
        return f"decoder.layers.{self.layer}.{self.linear.name.format(expert=expert)}"


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """Every site, in the order of layers, of the linears in a layer, and of experts."""

    settings: LoraSettings
    sites: tuple[Site, ...]

    def pairs(self) -> Iterator[tuple[Site, int, Pair]]:
        """(site, number of the pair in it, pair) in order."""
        return ((site, n, pair) for site in self.sites for n, pair in enumerate(site.pairs))


def plan_adapter(base: BaseConfig, settings: LoraSettings) -> AdapterPlan:
    """The sites that `settings` names.

    Raises:
        ConfigError: a target, an exclusion or a pattern matches nothing, or nothing is left.
    """
    adapted = _adapted(list(_targets(base, settings)), settings)
    for field in ("rank_pattern", "alpha_pattern"):
        chosen(adapted, field=field, patterns=getattr(settings, field))
    sites = [
        _site(tuple(targets), settings) for _, targets in groupby(adapted, key=lambda t: t.name)
    ]
    _check_experts(sites, settings)
    return AdapterPlan(settings, tuple(sites))


def _check_experts(sites: list[Site], settings: LoraSettings) -> None:
    """Raises `ConfigError` where a setting of experts' adapters is about none."""
    if any(site.linear.is_expert for site in sites):
        return
    for field, found in (
        ("experts", settings.experts),
        ("expert_layout", settings.expert_layout.value),
    ):
        if found != "per_expert":
            raise ConfigError(
                f"lora.{field}: found {found}, but no expert of the model has an adapter; "
                "leave it out, or add experts to lora.target_modules"
            )


def _adapted(targets: list[Target], settings: LoraSettings) -> list[Target]:
    if settings.target_modules == "all-linear":
        meant = {target for target in targets if target.own_names[0] != ROUTER}
    else:
        meant = chosen(targets, field="target_modules", patterns=settings.target_modules)
    meant -= chosen(targets, field="exclude_modules", patterns=settings.exclude_modules)
    if not meant:
        raise ConfigError(
            f"exclude_modules: {list(settings.exclude_modules)} leaves none of target_modules; "
            "remove one"
        )
    return [target for target in targets if target in meant]


def _targets(base: BaseConfig, settings: LoraSettings) -> Iterator[Target]:
    """All that the model and the type of the adapter offer, in order."""
    for layer in range(base.num_layers):
        for linear in layer_linears(base, layer):
            for expert in _experts(base, linear, settings):
                name = Site(layer, linear, expert, ()).name
                for projections, own_names in _choices(linear, settings):
                    yield Target(layer, linear, expert, projections, name, own_names)


def _experts(base: BaseConfig, linear: Linear, settings: LoraSettings) -> Iterable[int | None]:
    if not linear.is_expert or settings.experts == "shared":
        return (None,)
    assert base.moe is not None
    return range(base.moe.num_experts)


def _choices(
    linear: Linear, settings: LoraSettings
) -> list[tuple[tuple[Projection, ...], tuple[str, ...]]]:
    """What one pair can stand for, and what that is called."""
    own = linear.own_name
    if settings.type != "canonical_lora" or len(linear.projections) == 1:
        return [(linear.projections, (own,))]
    return [((p,), (p.canonical, own)) for p in linear.projections]


def _site(targets: tuple[Target, ...], settings: LoraSettings) -> Site:
    pairs = [
        Pair(
            target.projections,
            rank=_first(target, settings.rank_pattern, settings.rank),
            alpha=_first(target, settings.alpha_pattern, settings.alpha),
            use_rslora=settings.use_rslora,
        )
        for target in targets
    ]
    first = targets[0]
    return Site(first.layer, first.linear, first.expert, tuple(pairs))


def _first(target: Target, patterns: Mapping[str, N], default: N) -> N:
    """The value of the first pattern that means the target, as PEFT has it."""
    return next((v for pattern, v in patterns.items() if target.is_meant(pattern)), default)
