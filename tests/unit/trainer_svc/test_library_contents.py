"""State dicts as training loops have them, and what of them is published."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import peft
import pytest
import torch

from common.adapter import Dtype, Layout, LoraConfig
from common.errors import ConfigError, StagingFull
from trainer_svc.library.contents import read_contents

_PREFIX = "base_model.model.model.layers.0.self_attn"
CONFIG = {"r": 2, "lora_alpha": 4}


def state_dict(*, dtype: torch.dtype = torch.float32, adapter: str = "") -> dict[str, torch.Tensor]:
    """Rank 2 of q and k, from 8 to 8 and to 4."""
    torch.manual_seed(0)
    shapes = {
        "q_proj.lora_A": (2, 8),
        "q_proj.lora_B": (8, 2),
        "k_proj.lora_A": (2, 8),
        "k_proj.lora_B": (4, 2),
    }
    suffix = f".{adapter}.weight" if adapter else ".weight"
    return {
        f"{_PREFIX}.{name}{suffix}": torch.randn(shape).to(dtype) for name, shape in shapes.items()
    }


def written(tensors: Mapping[str, Any], config: object = CONFIG) -> dict[str, bytes]:
    """Every tensor's bytes in the flat buffer."""
    contents = read_contents(tensors, config)
    file = os.memfd_create("test")
    try:
        contents.write(file)
        assert os.fstat(file).st_size == contents.total_bytes
        flat = os.pread(file, contents.total_bytes, 0)
    finally:
        os.close(file)
    return {spec.name: flat[spec.offset_bytes : spec.end_bytes] for spec in contents.specs}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torch_tensors_arrive_bit_exactly(dtype: torch.dtype) -> None:
    """faults.md 17, verl#3675: in each dtype."""
    tensors = state_dict(dtype=dtype)

    assert written(tensors) == {
        name: tensor.contiguous().view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2"])
def test_numpy_arrays_arrive_little_endian_and_row_major(dtype: str) -> None:
    arrays = {name: t.numpy().astype(dtype) for name, t in state_dict().items()}
    expected = {
        name: array.astype(array.dtype.newbyteorder("<")).tobytes()
        for name, array in arrays.items()
    }

    assert written(arrays) == expected
    assert written({name: np.asfortranarray(a) for name, a in arrays.items()}) == expected


def test_tensors_that_do_not_lie_row_by_row_are_written_so() -> None:
    tensors = state_dict()
    turned = {name: tensor.t().contiguous().t() for name, tensor in tensors.items()}

    assert written(turned) == written(tensors)


def test_mixed_types_keep_their_own() -> None:
    tensors = state_dict()
    name = f"{_PREFIX}.k_proj.lora_B.weight"
    tensors[name] = tensors[name].bfloat16()

    contents = read_contents(tensors, CONFIG)

    assert {s.name: s.dtype for s in contents.specs} == {
        **dict.fromkeys(tensors, Dtype.FLOAT32),
        name: Dtype.BFLOAT16,
    }


def test_both_of_pefts_namings_are_one() -> None:
    plain = read_contents(state_dict(), CONFIG)
    named = read_contents(state_dict(adapter="default"), CONFIG)

    assert named.specs == plain.specs
    assert [spec.name.removeprefix(f"{_PREFIX}.") for spec in plain.specs] == [
        "q_proj.lora_A.weight",
        "k_proj.lora_A.weight",
        "q_proj.lora_B.weight",
        "k_proj.lora_B.weight",
    ]


def test_parameters_are_read_and_left_as_they_are() -> None:
    """faults.md 9, unsloth-zoo#941: the trainer's own tensors are not touched."""
    tensors = {name: torch.nn.Parameter(tensor) for name, tensor in state_dict().items()}

    assert written(tensors) == written(state_dict())
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state_dict().items())


def test_tensors_that_share_their_memory_travel_once() -> None:
    tensors = state_dict()
    q_a, k_a = (f"{_PREFIX}.{module}_proj.lora_A.weight" for module in "qk")
    tensors[k_a] = tensors[q_a].view(2, 8)

    contents = read_contents(tensors, CONFIG)

    assert {s.name: s.alias_of for s in contents.specs if s.alias_of} == {k_a: q_a}
    assert contents.total_bytes == 4 * (2 * 8 + 8 * 2 + 4 * 2)
    assert written(tensors)[k_a] == written(tensors)[q_a]


def test_equal_tensors_apart_and_a_square_pair_in_one_place_are_no_aliases() -> None:
    equal = state_dict()
    square = torch.ones(2, 2)
    module = f"{_PREFIX}.v_proj"
    shared = {f"{module}.lora_A.weight": square, f"{module}.lora_B.weight": square}
    for name in equal:
        equal[name] = torch.ones_like(equal[name])

    contents = read_contents(equal | shared, CONFIG)

    assert [spec.alias_of for spec in contents.specs] == [""] * 6


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(r=2, lora_alpha=4, target_modules="all-linear"),
        peft.LoraConfig(r=2, lora_alpha=4, target_modules=r".*\.(q|k)_proj"),
        peft.LoraConfig(r=2, lora_alpha=4, target_modules=["self_attn.q_proj", "k_proj"]),
        CONFIG | {"peft_type": "LORA", "task_type": None},
        LoraConfig(2, 4.0, ("anything",)),
    ],
)
def test_every_form_of_the_configuration_says_the_same(config: object) -> None:
    """faults.md 10, verl#7413: targets are what got factors, however they were chosen."""
    found = read_contents(state_dict(), config)

    assert found.lora == LoraConfig(2, 4.0, ("k_proj", "q_proj"))


def test_rslora_is_kept() -> None:
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], use_rslora=True)

    assert read_contents(state_dict(), config).lora.use_rslora


def test_dora_goes_out_where_replicas_may_merge_it() -> None:
    """A real PEFT model's, by both of its namings."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    base = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(8, 6, bias=False)})
    model = peft.get_peft_model(base, config)
    tensors = peft.get_peft_model_state_dict(model)
    named = {name: t for name, t in model.state_dict().items() if "lora_" in name}
    assert sorted(named) != sorted(tensors)

    contents = read_contents(tensors, config, dora=True)
    assert contents.lora.use_dora
    assert {spec.name: (spec.layout, spec.shape) for spec in contents.specs} == {
        "base_model.model.q_proj.lora_A.weight": (Layout.LORA_A, (2, 8)),
        "base_model.model.q_proj.lora_B.weight": (Layout.LORA_B, (6, 2)),
        "base_model.model.q_proj.lora_magnitude_vector": (Layout.MAGNITUDE, (6,)),
    }
    assert read_contents(named, config, dora=True).specs == contents.specs
    del tensors["base_model.model.q_proj.lora_magnitude_vector"]
    with pytest.raises(ConfigError, match="lora_magnitude_vector"):
        read_contents(tensors, config, dora=True)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (peft.LoraConfig(r=2, use_dora=True), "lora_config: use_dora = True cannot be served"),
        (peft.LoraConfig(r=2, bias="all"), "lora_config: bias = 'all' cannot be served"),
        (peft.LoraConfig(r=2, rank_pattern={"q": 4}), "lora_config: rank_pattern"),
        (peft.LoraConfig(r=2, alpha_pattern={"q": 4}), "lora_config: alpha_pattern"),
        (peft.LoraConfig(r=2, modules_to_save=["lm_head"]), "lora_config: modules_to_save"),
        (peft.LoraConfig(r=2, init_lora_weights="pissa"), "changes the base weights"),
        (CONFIG | {"init_lora_weights": "lora_ga"}, "changes the base weights"),
        (peft.LoraConfig(r=2, layer_replication=[(0, 2)]), "lora_config: layer_replication"),
        (peft.LoraConfig(r=2, lora_alpha=0), "lora_config: lora_alpha = 0"),
        (peft.LoraConfig(r=3), r"state_dict: tensor '.*q_proj.*' has shape \[2, 8\], of rank 2"),
        ({"lora_alpha": 4}, "lora_config: r = None"),
        (None, "lora_config: found a NoneType; give the peft.LoraConfig"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused(config: object, expected: str) -> None:
    """faults.md 14, verl#5325."""
    with pytest.raises(ConfigError, match=expected):
        read_contents(state_dict(), config)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"lm_head.weight": torch.zeros(2, 2)}, "'lm_head.weight' is no LoRA factor"),
        ({f"{_PREFIX}.q_proj.lora_magnitude_vector": torch.zeros(8)}, "use_dora is not set"),
        ({f"{_PREFIX}.q_proj.lora_E": torch.zeros(8)}, "is no LoRA factor"),
        ({f"{_PREFIX}.q_proj.lora_B.bias": torch.zeros(8)}, "is no LoRA factor"),
        ({"wte.lora_embedding_A": torch.zeros(2, 8)}, "is no LoRA factor"),
        ({f"{_PREFIX}.q_proj.lora_A.old.weight": torch.zeros(2, 8)}, "are two adapters'"),
        ({f"{_PREFIX}.v_proj.lora_A.weight": torch.zeros(2, 8)}, "has only lora_A"),
        ({f"{_PREFIX}.v_proj.lora_A.weight": torch.zeros(2, 8).double()}, "dtype 'float64'"),
        ({f"{_PREFIX}.v_proj.lora_A.weight": torch.zeros(2, 8, 1)}, r"shape \[2, 8, 1\]"),
    ],
)
def test_a_tensor_that_cannot_be_served_is_refused_by_name(
    more: dict[str, torch.Tensor], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        read_contents(state_dict() | more, CONFIG)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([1], "state_dict: found a list; give a dict of tensors by name"),
        (
            {1: np.ones((2, 8))},
            "state_dict: key 1 is of type int; give tensors by their PEFT names",
        ),
        (
            {"q_proj.lora_A.weight": [1]},
            "state_dict: 'q_proj.lora_A.weight' is of type list; "
            "give a torch tensor or numpy array",
        ),
    ],
)
def test_what_is_no_state_dict_is_refused_by_key_and_type(found: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_contents(found, CONFIG)

    assert str(refused.value) == expected


def test_an_empty_state_dict_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds no tensor"):
        read_contents({}, CONFIG)


def test_no_memory_is_one_clear_line() -> None:
    contents = read_contents(state_dict(), CONFIG)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(StagingFull, match="publish: 224 bytes of memory"):
            contents.write(full)
    finally:
        os.close(full)


def test_a_real_model_gives_the_same_by_either_way() -> None:
    base = torch.nn.Sequential()
    base.add_module("q_proj", torch.nn.Linear(8, 8))
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    config = model.peft_config["default"]
    own = {name: t for name, t in model.state_dict().items() if "lora_" in name}

    by_peft = written(peft.get_peft_model_state_dict(model), config)

    assert by_peft == written(own, config)
    assert sorted(by_peft) == [f"base_model.model.q_proj.lora_{part}.weight" for part in "AB"]


def test_importing_the_library_loads_no_heavy_package() -> None:
    code = (
        "import sys, trainer_svc.library; "
        "print(*({'torch', 'vllm', 'megatron', 'transformers', 'peft'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == []
