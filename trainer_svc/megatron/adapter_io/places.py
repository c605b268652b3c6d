"""Where an adapter's factors lie in PEFT's tensors: from the plan alone, no tensor looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from common.adapter import Dtype, ExpertLayout, Layout, TensorEntry
from common.errors import ConfigError
from common.peft_names import TensorName, read_name, tensor_name
from trainer_svc.megatron.adapter_io.expert_layouts import factor_view, holder, whole_shape
from trainer_svc.megatron.lora.pair import LEAVES, MAGNITUDE, A, leaf_shape
from trainer_svc.megatron.lora.plan import AdapterPlan, Pair, Site
from trainer_svc.megatron.model.base_config import BaseConfig
from trainer_svc.megatron.model.linears import Fusion, Projection


@dataclass(frozen=True, slots=True)
class Place:
    """A factor's place: a whole PEFT tensor, or one expert's part of it, or some rows of that."""

    name: str
    layout: Layout
    shape: tuple[int, ...]
    """Of the tensor."""

    alias_of: str = ""
    """The tensor that is the same, if another is."""

    expert: int = 0
    num_experts: int = 1
    """In the tensor."""

    rows: tuple[int, int] | None = None
    """Begin and end in the expert's part; None for all of it."""

    def view(self, tensor: Tensor) -> Tensor:
        """The place in the tensor's own memory."""
        part = factor_view(tensor, self.layout, expert=self.expert, num_experts=self.num_experts)
        return part if self.rows is None else part[self.rows[0] : self.rows[1]]

    @property
    def read_name(self) -> TensorName:
        """The parts of the name."""
        parts = read_name(self.name)
        assert parts is not None
        return parts


@dataclass(frozen=True, slots=True)
class Piece:
    """What one A, or one projection's rows of a B or of a magnitude, is in PEFT's tensors.

    It lies, the same, in each of `places`: a fused projection's A is that of each projection, a
    shared adapter that of each expert. The first place is no alias.
    """

    places: tuple[Place, ...]


Pieces: TypeAlias = dict[tuple[int, int, str], tuple[Piece, ...]]
"""By number of the site in the plan, number of the pair in the site, and leaf; in that order."""


def pieces(plan: AdapterPlan, base: BaseConfig, *, experts: ExpertLayout) -> Pieces:
    """Of every tensor of the adapter its pieces, in the plan's order.

    Raises:
        ConfigError: the experts' factors cannot lie so.
    """
    if experts is not ExpertLayout.PER_EXPERT:
        _check_packed(plan, base, experts)
    found: Pieces = {}
    for number, site in enumerate(plan.sites):
        layout = experts if site.linear.is_expert else ExpertLayout.PER_EXPERT
        for pair_number, pair in enumerate(site.pairs):
            for leaf in leaves(plan):
                of_leaf = (
                    _own_tensors(base, site, pair, leaf)
                    if layout is ExpertLayout.PER_EXPERT
                    else _packed(base, site, pair, leaf, layout=layout)
                )
                found[number, pair_number, leaf] = tuple(of_leaf)
    return found


def leaves(plan: AdapterPlan) -> tuple[str, ...]:
    """The tensors that each pair has, by name."""
    return LEAVES if plan.settings.type == "dora" else LEAVES[:2]


def entries(of_plan: Pieces, *, dtype: Dtype) -> Iterator[TensorEntry]:
    """Every PEFT tensor once."""
    seen = set()
    for of_leaf in of_plan.values():
        for place in (place for piece in of_leaf for place in piece.places):
            if place.name not in seen:
                seen.add(place.name)
                yield TensorEntry(place.name, dtype, place.shape, place.layout, place.alias_of)


def experts_of(base: BaseConfig, site: Site) -> Sequence[int]:
    """The experts that a site's adapter is for; one, of no meaning, where it is no expert's."""
    if not site.linear.is_expert:
        return (0,)
    assert base.moe is not None
    return range(base.moe.num_experts) if site.expert is None else (site.expert,)


def module_name(site: Site, projection: Projection, *, expert: int) -> str:
    """A projection's name in the base model."""
    return f"model.layers.{site.layer}.{projection.name.format(expert=expert)}"


def _own_tensors(base: BaseConfig, site: Site, pair: Pair, leaf: str) -> Iterator[Piece]:
    """A tensor for each module; A's is one piece with a name for each projection."""
    groups = [pair.projections] if leaf == A else [(p,) for p in pair.projections]
    layout = _own_layout(leaf)
    for projections in groups:
        shape = leaf_shape(site, pair, leaf)
        if leaf != A:
            shape = (projections[0].out_features, *shape[1:])
        names = [
            tensor_name(module_name(site, projection, expert=expert), layout)
            for expert in experts_of(base, site)
            for projection in projections
        ]
        first, *others = names
        aliases = [Place(name, layout, shape, alias_of=first) for name in others]
        yield Piece((Place(first, layout, shape), *aliases))


def _own_layout(leaf: str) -> Layout:
    if leaf == MAGNITUDE:
        return Layout.MAGNITUDE
    return Layout.LORA_A if leaf == A else Layout.LORA_B


def _packed(
    base: BaseConfig, site: Site, pair: Pair, leaf: str, *, layout: ExpertLayout
) -> Iterator[Piece]:
    """A part of a tensor with all experts' factors; gate's rows lie above up's."""
    assert base.moe is not None
    size = base.moe.num_experts
    tag = holder(layout, is_a=leaf == A)
    rank_in_out = leaf_shape(site, pair, leaf)
    shape = whole_shape(tag, num_experts=size, factor=(rank_in_out[0], rank_in_out[1]))
    name = tensor_name(_packed_module(site, layout), tag)
    begin = 0
    for rows in (None,) if leaf == A else (p.out_features for p in pair.projections):
        place = None if rows is None else (begin, begin + rows)
        begin += rows or 0
        yield Piece(
            tuple(
                Place(name, tag, shape, expert=expert, num_experts=size, rows=place)
                for expert in experts_of(base, site)
            )
        )


def _packed_module(site: Site, layout: ExpertLayout) -> str:
    block = site.linear.projections[0].name.partition(".{expert}")[0]
    is_gate_up = site.linear.fusion is Fusion.GATE_UP
    if layout is ExpertLayout.PACKED:
        own = ".gate_up_proj" if is_gate_up else ".down_proj"
    else:
        own = ".base_layer" if is_gate_up else ""
    return f"model.layers.{site.layer}.{block}{own}"


def _check_packed(plan: AdapterPlan, base: BaseConfig, experts: ExpertLayout) -> None:
    """One tensor can hold all experts' factors, and both linears' tensors are there."""

    def refuse(problem: str) -> None:
        raise ConfigError(
            f"lora.expert_layout: found {experts.value}, but {problem}; use per_expert"
        )

    groups: dict[tuple[int, str], list[Site]] = {}
    for site in plan.sites:
        if site.linear.is_expert:
            groups.setdefault((site.layer, site.linear.name), []).append(site)
    if groups and plan.settings.type == "dora":
        refuse("it has no tensor for DoRA's magnitudes")
    for (layer, name), sites in groups.items():
        num_experts = sum(len(experts_of(base, site)) for site in sites)
        if base.moe is None or num_experts != base.moe.num_experts:
            refuse(f"only {num_experts} experts of layer {layer} have an adapter")
        if len({pair.rank for site in sites for pair in site.pairs}) > 1:
            refuse(f"the adapters of layer {layer}'s experts differ in rank")
        if len({pair.alpha for site in sites for pair in site.pairs}) > 1:
            refuse(f"the adapters of layer {layer}'s experts differ in alpha")
        if any(site.pairs[0].projections != site.linear.projections for site in sites):
            refuse("gate and up have an adapter each")
        if len([key for key in groups if key[0] == layer]) != 2:
            refuse(f"of layer {layer} only {name.rpartition('.')[2]} has an adapter")
