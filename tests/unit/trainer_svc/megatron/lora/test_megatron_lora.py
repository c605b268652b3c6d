"""Adapters on one rank: what they add to a linear, what trains, and how it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import tiny_models
from trainer_svc.megatron.lora.layers import (
    LoraLinear,
    add_lora,
    lora_linears,
    merged_weight,
    trained_tensors,
    wrapped_linears,
)
from trainer_svc.megatron.lora.plan import plan_adapter
from trainer_svc.megatron.lora.settings import LoraSettings
from trainer_svc.megatron.model.build import BaseModel, build_model
from trainer_svc.megatron.model.forward import hidden_states, output_logits
from trainer_svc.megatron.model.layout import causal_layout

pytestmark = pytest.mark.usefixtures("ranks")

TOKENS = torch.arange(1, 13)


def adapted(
    model_dir: Path, *, base_dtype: torch.dtype = torch.float32, **settings: Any
) -> BaseModel:
    base = build_model(model_dir, dtype=base_dtype)
    lora = LoraSettings.model_validate({"rank": 4, "alpha": 8} | settings)
    add_lora(base, plan=plan_adapter(base.config, lora), seed=5)
    return base


def fill_b(base: BaseModel) -> None:
    """Give every B values, as training would."""
    generator = torch.Generator().manual_seed(11)
    for tensor in trained_tensors(base.chunks):
        if tensor.name.endswith("lora_b"):
            torch.nn.init.normal_(tensor.parameter, std=0.1, generator=generator)


def logits(base: BaseModel) -> Tensor:
    (chunk,) = base.chunks
    return output_logits(chunk, hidden_states(chunk, TOKENS, layout=causal_layout([12])))


def set_active(base: BaseModel, name: str | None) -> None:
    for linear in wrapped_linears(base.chunks):
        linear.active = name


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("qwen3_moe", tmp_path_factory.mktemp("moe"))


@pytest.mark.parametrize("kind", ["lora", "canonical_lora", "dora"])
def test_only_the_adapter_trains_and_all_of_it(tiny_dir: Path, kind: str) -> None:
    base = adapted(tiny_dir, type=kind)
    fill_b(base)
    torch.autograd.backward(logits(base).square().mean())
    trained = {id(tensor.parameter) for tensor in trained_tensors(base.chunks)}
    (chunk,) = base.chunks
    for name, parameter in chunk.named_parameters():
        assert (id(parameter) in trained) == (parameter.grad is not None), name
    per_layer = {"lora": 4 * 2, "canonical_lora": 7 * 2, "dora": 4 * 3}[kind]
    assert len(trained) == 2 * per_layer


@pytest.mark.parametrize("kind", ["lora", "canonical_lora", "dora"])
def test_a_new_adapter_leaves_the_base_as_it_is(moe_dir: Path, kind: str) -> None:
    base = logits(build_model(moe_dir, dtype=torch.float32))
    targets = ["linear_*", "router"]
    found = logits(adapted(moe_dir, type=kind, target_modules=targets))
    torch.testing.assert_close(found, base, atol=0 if kind != "dora" else 1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_without_an_active_adapter_the_model_is_the_base(moe_dir: Path, kind: str) -> None:
    base = logits(build_model(moe_dir, dtype=torch.float32))
    model = adapted(moe_dir, type=kind, target_modules=["linear_*", "router"])
    fill_b(model)
    trained = logits(model)
    assert (trained - base).abs().max() > 0.01
    set_active(model, None)
    assert torch.equal(logits(model), base)
    set_active(model, "default")
    assert torch.equal(logits(model), trained)


def test_names_and_shapes_of_what_trains(moe_dir: Path) -> None:
    base = adapted(
        moe_dir, type="canonical_lora", target_modules=["*.0.*.linear_qkv", "linear_fc1"]
    )
    tensors = {tensor.name: tensor for tensor in trained_tensors(base.chunks)}
    names = list(tensors)
    first = "decoder.layers.0.self_attention.linear_qkv"
    assert names[:4] == [f"{first}.{n}.{x}" for n in (0, 1) for x in ("lora_a", "lora_b")]
    assert names[-1] == "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.1.lora_b"
    query, key = tensors[f"{first}.0.lora_b"], tensors[f"{first}.1.lora_b"]
    assert (query.whole_shape, key.whole_shape) == ((96, 4), (48, 4))
    assert (query.split_dim, query.blocks, query.is_expert) == (0, 1, False)
    expert = tensors[names[-1]]
    assert (expert.whole_shape, expert.pair_number) == ((24, 4), 1)
    assert expert.is_expert
    assert not expert.is_shared_by_experts


def test_fused_gate_and_up_are_two_blocks_of_rows(tiny_dir: Path) -> None:
    base = adapted(tiny_dir, type="dora", target_modules=["linear_fc1", "linear_proj"])
    found = {
        tensor.name.removeprefix("decoder.layers.0."): (tensor.split_dim, tensor.blocks)
        for tensor in trained_tensors(base.chunks)
        if tensor.site.layer == 0
    }
    assert found == {
        "self_attention.linear_proj.0.lora_a": (1, 1),
        "self_attention.linear_proj.0.lora_b": (None, 1),
        "self_attention.linear_proj.0.magnitude": (None, 1),
        "mlp.linear_fc1.0.lora_a": (None, 1),
        "mlp.linear_fc1.0.lora_b": (0, 2),
        "mlp.linear_fc1.0.magnitude": (0, 2),
    }


def test_experts_that_share_an_adapter_hold_the_same_tensors(moe_dir: Path) -> None:
    base = adapted(moe_dir, experts="shared", target_modules=["*.layers.1.*.linear_fc2"])
    shared = list(lora_linears(base.chunks))
    experts = wrapped_linears(base.chunks)
    assert len(shared) == 1
    assert [linear.expert for linear in experts] == [0, 1, 2, 3]
    assert len({id(linear.pairs("default")[0].lora_a) for linear in experts}) == 1
    tensors = trained_tensors(base.chunks)
    assert [tensor.name.rpartition(".")[2] for tensor in tensors] == ["lora_a", "lora_b"]
    assert all(tensor.is_shared_by_experts for tensor in tensors)


def test_qkv_rows_of_a_projection_land_in_their_groups(tmp_path: Path) -> None:
    """faults.md 12, Megatron-Bridge#1818, miles#2550: heads 8, groups 2, head_dim 4."""
    path = tiny_models.save(
        "llama", tmp_path, num_attention_heads=8, num_key_value_heads=2, head_dim=4
    )
    base = adapted(path, type="canonical_lora", target_modules=["linear_qkv"], rank=1, alpha=1)
    linear = next(lora_linears(base.chunks))
    starts = {"linear_q": 0, "linear_k": 100, "linear_v": 200}
    for pair in linear.pairs("default"):
        rows = pair.pair.out_features
        start = starts[pair.pair.projections[0].canonical]
        pair.lora_a.data.fill_(1 / 64)
        pair.lora_b.data.copy_(torch.arange(start, start + rows).view(-1, 1))
    x = torch.ones(1, 1, 64)
    rows = (linear(x)[0] - linear.base(x)[0]).flatten().round().tolist()
    assert rows == [
        *(*range(16), *range(100, 104), *range(200, 204)),
        *(*range(16, 32), *range(104, 108), *range(204, 208)),
    ]


@pytest.mark.parametrize("kind", ["lora", "canonical_lora", "dora"])
def test_a_merged_weight_computes_what_the_adapter_does(moe_dir: Path, kind: str) -> None:
    base = adapted(moe_dir, type=kind)
    fill_b(base)
    linears = wrapped_linears(base.chunks)
    before = [linear.weight.clone() for linear in linears]
    for linear in linears:
        x = torch.randn(3, 1, linear.site.linear.in_features)
        merged = x @ merged_weight(linear).t()
        torch.testing.assert_close(merged, linear(x)[0], atol=1e-4, rtol=1e-4)
    assert all(torch.equal(b, linear.weight) for b, linear in zip(before, linears, strict=True))


def test_a_merged_weight_is_rounded_once(tiny_dir: Path) -> None:
    base = adapted(tiny_dir, base_dtype=torch.bfloat16, target_modules=["linear_fc2"])
    fill_b(base)
    linear = next(lora_linears(base.chunks))
    (pair,) = linear.pairs("default")
    exact = linear.weight.float() + 2.0 * (pair.lora_b @ pair.lora_a)
    assert torch.equal(merged_weight(linear), exact.bfloat16())


def changes(linear: LoraLinear, x: Tensor) -> Tensor:
    change: Tensor = linear(x)[0] - linear.base(x)[0]
    return change


def dropout_linear(tiny_dir: Path, position: str) -> LoraLinear:
    base = adapted(tiny_dir, dropout=0.5, dropout_position=position, target_modules=["linear_fc2"])
    fill_b(base)
    return next(lora_linears(base.chunks))


def test_dropout_before_thins_the_input_of_a(tiny_dir: Path) -> None:
    linear = dropout_linear(tiny_dir, "pre")
    (pair,) = linear.pairs("default")
    x = torch.ones(1, 1, 80)
    torch.manual_seed(3)
    thinned = torch.nn.functional.dropout(x, 0.5)
    torch.manual_seed(3)
    expected = 2.0 * thinned @ pair.lora_a.t() @ pair.lora_b.t()
    torch.testing.assert_close(changes(linear, x), expected, atol=1e-5, rtol=1e-4)
    linear.eval()
    whole = 2.0 * x @ pair.lora_a.t() @ pair.lora_b.t()
    torch.testing.assert_close(changes(linear, x), whole, atol=1e-5, rtol=1e-4)


def test_dropout_after_thins_the_output(tiny_dir: Path) -> None:
    linear = dropout_linear(tiny_dir, "post")
    x = torch.ones(1, 1, 80)
    torch.manual_seed(3)
    found = changes(linear, x)
    linear.eval()
    whole = changes(linear, x)
    dropped = found.abs() < 1e-6
    assert 0.2 < dropped.float().mean() < 0.8
    torch.testing.assert_close(found[~dropped], 2 * whole[~dropped], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["lora", "canonical_lora", "dora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_type_trains_in_its_own_dtype_on_a_bfloat16_base(
    moe_dir: Path, kind: str, dtype: str
) -> None:
    """Megatron-Bridge's canonical LoRA takes no heed of it."""
    targets = ["linear_*", "router"]
    base = adapted(
        moe_dir, base_dtype=torch.bfloat16, type=kind, dtype=dtype, target_modules=targets
    )
    fill_b(base)
    torch.autograd.backward(logits(base).square().mean())
    wanted = getattr(torch, dtype)
    for tensor in trained_tensors(base.chunks):
        assert tensor.parameter.dtype is wanted
        assert tensor.parameter.grad is None or tensor.parameter.grad.dtype is wanted


@pytest.mark.parametrize(
    ("kind", "deviation"),
    [
        ("xavier", (2 / 68) ** 0.5),
        ("xavier_uniform", (2 / 68) ** 0.5),
        ("kaiming", 64**-0.5 / 3**0.5),
        ("normal", 0.25),
    ],
)
def test_a_starts_with_the_deviation_of_its_init(
    tiny_dir: Path, kind: str, deviation: float
) -> None:
    first, *_, last = (
        linear.pairs("default")[0] for linear in lora_linears(adapted(tiny_dir, a_init=kind).chunks)
    )
    assert first.lora_a.shape == (4, 64)
    assert first.lora_a.std().item() == pytest.approx(deviation, rel=0.15)
    assert not first.lora_b.any()
    assert not torch.equal(first.lora_a[:, :64], last.lora_a[:, :64]), "two layers start alike"


def test_a_b_that_is_not_zero_starts_elsewhere_and_so_does_its_magnitude(tiny_dir: Path) -> None:
    base = adapted(tiny_dir, type="dora", b_init="normal")
    for linear in lora_linears(base.chunks):
        (pair,) = linear.pairs("default")
        assert pair.lora_b.std().item() == pytest.approx(0.25, rel=0.15)
        assert pair.magnitude is not None
        changed = linear.weight + 2.0 * pair.lora_b @ pair.lora_a
        torch.testing.assert_close(pair.magnitude, changed.norm(dim=1), atol=1e-4, rtol=1e-5)
