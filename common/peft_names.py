"""How PEFT names an adapter's tensors, and what a name says about the tensor's layout."""

from __future__ import annotations

from typing import NamedTuple

from common.adapter import ExpertLayout, Layout

PREFIX = "base_model.model."
"""Before the name that a module has in the base model."""

EXPERTS = "experts"
"""In `target_modules`: the weights of all experts of a layer, which PEFT targets as parameters."""

EXPERT_PARAMETERS = ("experts.gate_up_proj", "experts.down_proj")
"""What PEFT calls them in `target_parameters`."""

_FACTORS = ("lora_A.weight", "lora_B.weight")
MAGNITUDE = "lora_magnitude_vector"
"""DoRA's, in a tensor's name."""

_NESTED = {".experts.base_layer": ".experts.gate_up_proj", ".experts": ".experts.down_proj"}
"""PEFT wraps the second parameter of a module around the first, and names neither."""


class TensorName(NamedTuple):
    """A name in two parts; `module` is without PEFT's prefix.

    >>> read_name("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight")
    TensorName(module='model.layers.0.self_attn.q_proj', leaf='lora_A.weight')
    """

    module: str
    leaf: str

    @property
    def own_name(self) -> str:
        """`lora_A`, `lora_B` or `lora_magnitude_vector`."""
        return self.leaf.removesuffix(".weight")

    @property
    def layouts(self) -> frozenset[ExpertLayout]:
        """How the experts' factors may lie in the tensor; all ways where it is no expert's."""
        if self.module.endswith(tuple(_NESTED)):
            return frozenset({ExpertLayout.FLAT, ExpertLayout.SWAPPED})
        if self.module.endswith(tuple(_NESTED.values())):
            return frozenset({ExpertLayout.PACKED})
        expert = self.module.rpartition(".")[0].rpartition(".")[2]
        return frozenset({ExpertLayout.PER_EXPERT} if expert.isdigit() else ExpertLayout)

    @property
    def parameter(self) -> str:
        """The module's name as PEFT's patterns see it."""
        for nested, parameter in _NESTED.items():
            if self.module.endswith(nested):
                return self.module.removesuffix(nested) + parameter
        return self.module

    def layout(self, experts: ExpertLayout) -> Layout:
        """The tensor's tag in an adapter whose experts lie so."""
        if self.leaf == MAGNITUDE:
            return Layout.MAGNITUDE
        whole = ExpertLayout.PER_EXPERT not in self.layouts
        return (experts if whole else ExpertLayout.PER_EXPERT).factors[_FACTORS.index(self.leaf)]


def read_name(name: str) -> TensorName | None:
    """The parts of a LoRA tensor's name; None where it is none."""
    for leaf in (*_FACTORS, MAGNITUDE):
        module = name.removesuffix(f".{leaf}")
        if module and module != name:
            return TensorName(module.removeprefix(PREFIX), leaf)
    return None


def tensor_name(module: str, layout: Layout) -> str:
    """PEFT's name of a tensor of a module that is named as in the base model."""
    leaf = MAGNITUDE if layout is Layout.MAGNITUDE else _FACTORS[layout.value.endswith("B")]
    return f"{PREFIX}{module}.{leaf}"
