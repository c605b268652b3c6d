"""What a tensor's name says, and what it leaves to a tag."""

from __future__ import annotations

import pytest

from common.adapter import ExpertLayout, Layout
from common.errors import ConfigError
from common.peft_names import read_name, tensor_name
from common.peft_tensors import expert_layout

BLOCK = "base_model.model.model.layers.0.mlp.experts"
ANY = frozenset(ExpertLayout)


@pytest.mark.parametrize(
    ("name", "module", "parameter", "layouts"),
    [
        (f"{BLOCK}.3.up_proj.lora_A.weight", ".3.up_proj", ".3.up_proj", {"per_expert"}),
        (f"{BLOCK}.gate_up_proj.lora_B.weight", ".gate_up_proj", ".gate_up_proj", {"packed"}),
        (f"{BLOCK}.base_layer.lora_A.weight", ".base_layer", ".gate_up_proj", {"flat", "swapped"}),
        (f"{BLOCK}.lora_A.weight", "", ".down_proj", {"flat", "swapped"}),
    ],
)
def test_a_name_of_experts_tells_how_they_lie(
    name: str, module: str, parameter: str, layouts: set[str]
) -> None:
    found = read_name(name)
    assert found is not None
    assert found.module == f"model.layers.0.mlp.experts{module}"
    assert found.parameter == f"model.layers.0.mlp.experts{parameter}"
    assert {layout.value for layout in found.layouts} == layouts


def test_a_name_is_read_as_it_is_written() -> None:
    for layout in (Layout.LORA_A, Layout.LORA_B, Layout.MAGNITUDE):
        name = tensor_name("model.layers.1.self_attn.q_proj", layout)
        found = read_name(name)
        assert found is not None
        assert found.layouts == ANY
        assert found.layout(ExpertLayout.FLAT) is layout
        assert tensor_name(found.module, layout) == name
    assert name == "base_model.model.model.layers.1.self_attn.q_proj.lora_magnitude_vector"


@pytest.mark.parametrize("name", ["lora_A.weight", "x.lora_A.bias", "x.lora_embedding_A", ""])
def test_other_names_are_no_factors(name: str) -> None:
    assert read_name(name) is None


@pytest.mark.parametrize("experts", ExpertLayout)
def test_a_tag_counts_for_experts_alone(experts: ExpertLayout) -> None:
    whole, own = read_name(f"{BLOCK}.lora_B.weight"), read_name("x.q_proj.lora_B.weight")
    assert whole is not None
    assert own is not None
    assert whole.layout(experts) is experts.factors[1]
    assert own.layout(experts) is Layout.LORA_B


def test_without_experts_a_tag_says_nothing() -> None:
    assert expert_layout("f", ["x.q_proj.lora_A.weight"]) is ExpertLayout.PER_EXPERT


def test_names_of_two_layouts_are_refused() -> None:
    names = [f"{BLOCK}.0.up_proj.lora_A.weight", f"{BLOCK}.gate_up_proj.lora_A.weight"]
    with pytest.raises(ConfigError, match=r"^f: .* of expert layout packed, .* say per_expert"):
        expert_layout("f", names)
