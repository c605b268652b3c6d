"""Named adapters and the base's weights on the host, on a real Megatron model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.errors import AdapterNotFound, AlreadyExists, Incompatible, InvalidField
from tests import tiny_models
from trainer_svc.megatron.lora.layers import add_lora, trained_tensors, wrapped_linears
from trainer_svc.megatron.lora.movable_base import MovableBase
from trainer_svc.megatron.lora.plan import plan_adapter
from trainer_svc.megatron.lora.policies import PolicyAdapters
from trainer_svc.megatron.lora.settings import LoraSettings
from trainer_svc.megatron.model.build import BaseModel, build_model


@pytest.fixture(scope="module")
def model_dirs(ranks: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: tiny_models.save(name, root / name) for name in ("llama", "qwen3_moe")}


def build(path: Path, **lora: object) -> BaseModel:
    base = build_model(path, dtype=torch.float32)
    settings = LoraSettings.model_validate({"rank": 4, "alpha": 8, "b_init": "normal"} | lora)
    add_lora(base, plan=plan_adapter(base.config, settings), seed=3)
    return base


def masters_of(base: BaseModel) -> dict[str, Tensor]:
    """What an optimizer holds: a float32 parameter itself, a copy of a narrower one."""
    return {
        t.name: t.parameter.detach() if t.parameter.dtype is torch.float32 else t.parameter.float()
        for t in trained_tensors(base.chunks)
    }


@pytest.fixture
def base(model_dirs: dict[str, Path]) -> BaseModel:
    return build(model_dirs["llama"])


@pytest.fixture
def policies(base: BaseModel) -> PolicyAdapters:
    return PolicyAdapters(base.chunks, masters=masters_of(base))


def values(base: BaseModel, adapter: str) -> list[Tensor]:
    return [t.parameter.detach().clone() for t in trained_tensors(base.chunks, adapter=adapter)]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@torch.no_grad()
def output(base: BaseModel) -> Tensor:
    """Of one adapted linear, on fixed input."""
    linear = wrapped_linears(base.chunks)[0]
    return linear(torch.linspace(-1, 1, 3 * 64).view(3, 1, 64))[0]  # type: ignore[no-any-return]


def active(base: BaseModel) -> set[str | None]:
    return {linear.active for linear in wrapped_linears(base.chunks)}


def train(base: BaseModel, step: float) -> None:
    """Move every tensor of `default`, as an optimizer would."""
    with torch.no_grad():
        for tensor in trained_tensors(base.chunks):
            tensor.parameter.add_(step)


def test_an_added_adapter_has_the_same_values_and_does_not_train(
    base: BaseModel, policies: PolicyAdapters
) -> None:
    assert list(policies.names) == ["default", "reference"]
    policies.add_adapter("old")
    assert list(policies.names) == ["default", "old", "reference"]
    assert len(values(base, "old")) == 2 * 4 * 2
    assert equal(values(base, "old"), values(base, "default"))
    train(base, 0.5)
    assert not equal(values(base, "old"), values(base, "default"))
    assert {t.parameter.requires_grad for t in trained_tensors(base.chunks, adapter="old")} == {
        False
    }
    assert {t.parameter.requires_grad for t in trained_tensors(base.chunks)} == {True}


def test_each_policy_computes_with_its_own_tensors(
    base: BaseModel, policies: PolicyAdapters
) -> None:
    policies.add_adapter("old")
    before = output(base)
    train(base, 0.25)
    after = output(base)
    with policies.use_adapter("old"):
        assert torch.equal(output(base), before)
    with policies.use_adapter("reference"):
        alone = output(base)
    linear = wrapped_linears(base.chunks)[0]
    with policies.disable_adapter():
        assert torch.equal(output(base), alone)
    assert torch.equal(linear.base(torch.linspace(-1, 1, 192).view(3, 1, 64))[0], alone)
    assert torch.equal(output(base), after)
    assert not torch.equal(after, before)
    assert not torch.equal(before, alone)


def test_what_was_in_use_comes_back_also_nested_and_after_an_error(
    base: BaseModel, policies: PolicyAdapters
) -> None:
    policies.add_adapter("old")
    with policies.use_adapter("old"):
        with policies.disable_adapter():
            assert active(base) == {None}
            with policies.use_adapter("default"):
                assert active(base) == {"default"}
            assert active(base) == {None}
        assert active(base) == {"old"}
        with pytest.raises(ZeroDivisionError), policies.use_adapter("default"):
            raise ZeroDivisionError
        assert active(base) == {"old"}
    assert active(base) == {"default"}
    with pytest.raises(AdapterNotFound, match="found odl, there are default, old, reference"):
        policies.use_adapter("odl")
    assert active(base) == {"default"}


def test_copy_sets_one_adapter_to_another(base: BaseModel, policies: PolicyAdapters) -> None:
    policies.add_adapter("old")
    start = values(base, "default")
    train(base, 0.5)
    trained = values(base, "default")
    policies.copy_adapter("old", "default")
    assert equal(values(base, "default"), start)
    assert {t.parameter.requires_grad for t in trained_tensors(base.chunks)} == {True}
    train(base, 0.5)
    policies.copy_adapter("default", "old")
    assert equal(values(base, "old"), trained)


@pytest.mark.parametrize("decay", [0.0, 0.25, 1.0])
def test_an_ema_moves_the_target_towards_the_source(
    base: BaseModel, policies: PolicyAdapters, decay: float
) -> None:
    policies.add_adapter("old")
    train(base, 0.5)
    source, target = values(base, "default"), values(base, "old")
    policies.ema_update_adapter("default", "old", decay=decay)
    expected = [torch.lerp(t, s, 1 - decay) for s, t in zip(source, target, strict=True)]
    assert equal(values(base, "old"), expected)
    assert equal(values(base, "default"), source)
    if decay in (0.0, 1.0):
        assert equal(expected, target if decay else source)


@pytest.mark.parametrize("decay", [-0.01, 1.01, float("nan")])
def test_a_decay_outside_of_0_to_1_is_refused(
    base: BaseModel, policies: PolicyAdapters, decay: float
) -> None:
    policies.add_adapter("old")
    train(base, 0.5)
    before = values(base, "old")
    with pytest.raises(InvalidField, match="use a number from 0 to 1"):
        policies.ema_update_adapter("default", "old", decay=decay)
    assert equal(values(base, "old"), before)


def test_the_reference_has_no_tensors_to_read_or_write(policies: PolicyAdapters) -> None:
    policies.add_adapter("old")
    for source, target in (("default", "reference"), ("reference", "old")):
        with pytest.raises(InvalidField, match="reference is the base alone"):
            policies.copy_adapter(source, target)
        with pytest.raises(InvalidField, match="reference is the base alone"):
            policies.ema_update_adapter(source, target, decay=0.5)
    with pytest.raises(InvalidField, match="reference is the base alone"):
        policies.add_adapter("new", like="reference")
    with pytest.raises(AlreadyExists, match="adapter: reference is there already"):
        policies.add_adapter("reference")


@pytest.mark.parametrize("name", ["", "a.b", "keys", "a b"])
def test_a_name_that_no_module_can_have_is_refused(policies: PolicyAdapters, name: str) -> None:
    with pytest.raises(InvalidField, match="cannot be a name"):
        policies.add_adapter(name)
    assert list(policies.names) == ["default", "reference"]


def test_a_taken_name_and_an_unknown_source_are_refused(policies: PolicyAdapters) -> None:
    policies.add_adapter("old")
    with pytest.raises(AlreadyExists, match="adapter: old is there already"):
        policies.add_adapter("old")
    with pytest.raises(AdapterNotFound, match="adapter: found ghost"):
        policies.add_adapter("new", like="ghost")
    with pytest.raises(AdapterNotFound, match="adapter: found ghost"):
        policies.copy_adapter("default", "ghost")


def test_adapters_that_do_not_match_are_not_copied(
    base: BaseModel, policies: PolicyAdapters, model_dirs: dict[str, Path]
) -> None:
    policies.add_adapter("old")
    other = build(model_dirs["llama"], rank=2)
    fewer = build(model_dirs["llama"], target_modules=("linear_qkv",))
    before = values(base, "old")
    for odd, message in (
        (other, r"lora_a has shape \(2, 64\) in default and \(4, 64\) in old; give both the same"),
        (fewer, r"only one of default and old has .* \(12 tensors differ\)"),
    ):
        # The masters that a wrong optimizer would hand over.
        mixed = PolicyAdapters(base.chunks, masters=masters_of(odd))
        mixed._masters["old"] = policies.masters("old")
        with pytest.raises(Incompatible, match=message):
            mixed.copy_adapter("default", "old")
    empty = PolicyAdapters(base.chunks, masters={})
    empty._masters["old"] = policies.masters("old")
    with pytest.raises(Incompatible, match=r"\(16 tensors differ\)"):
        empty.copy_adapter("default", "old")
    assert equal(values(base, "old"), before)


def test_a_slow_ema_of_a_bfloat16_adapter_adds_up_in_float32(model_dirs: dict[str, Path]) -> None:
    """A bfloat16 step of 1e-3 of the way would round back to where it was."""
    base = build(model_dirs["llama"], dtype="bfloat16")
    masters = masters_of(base)
    policies = PolicyAdapters(base.chunks, masters=masters)
    policies.add_adapter("old")
    start = {name: value.clone() for name, value in policies.masters("old").items()}
    for value in masters.values():
        value.add_(1.0)
    for _ in range(100):
        policies.ema_update_adapter("default", "old", decay=0.999)
    for tensor in trained_tensors(base.chunks, adapter="old"):
        master = policies.masters("old")[tensor.name]
        assert tensor.parameter.dtype is torch.bfloat16
        assert torch.equal(tensor.parameter, master.bfloat16())
        moved = master - start[tensor.name]
        torch.testing.assert_close(moved, torch.full_like(moved, 1 - 0.999**100), atol=1e-5, rtol=0)


def test_experts_that_share_an_adapter_share_its_copies(model_dirs: dict[str, Path]) -> None:
    base = build(model_dirs["qwen3_moe"], experts="shared", target_modules=("linear_fc1",))
    policies = PolicyAdapters(base.chunks, masters=masters_of(base))
    policies.add_adapter("old")
    linears = wrapped_linears(base.chunks)
    assert len(linears) == 2 * 4
    assert len({id(linear.pairs("old")[0]) for linear in linears}) == 2
    assert len(policies.masters("old")) == 2 * 2
    train(base, 0.5)
    policies.ema_update_adapter("default", "old", decay=0.5)
    train(base, -0.25)
    for old, new in zip(values(base, "old"), values(base, "default"), strict=True):
        torch.testing.assert_close(old, new, atol=1e-6, rtol=0)


def test_base_weights_move_to_the_host_and_back_as_the_same_parameters(base: BaseModel) -> None:
    """`cpu:0` is another device than `cpu` to torch: its tensors are copied for real."""
    weights = MovableBase(base.chunks, device=torch.device("cpu:0"))
    before, parameters = output(base), dict(base.chunks[0].named_parameters())
    own = [p for name, p in parameters.items() if "lora_" not in name]
    assert weights.size_bytes == sum(p.numel() * 4 for p in own) > 0
    content, addresses = [p.detach().clone() for p in own], [p.data_ptr() for p in own]
    with weights.resident():
        assert [p.data_ptr() for p in own] == addresses
    adapters = [t.parameter.data_ptr() for t in trained_tensors(base.chunks)]
    weights.offload()
    host = [p.data_ptr() for p in own]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), weights.resident(), weights.resident():
            assert not set(p.data_ptr() for p in own) & set(host)
            assert torch.equal(output(base), before)
            raise ZeroDivisionError
        assert [p.data_ptr() for p in own] == host
    weights.offload()
    weights.onload()
    weights.onload()
    assert not set(p.data_ptr() for p in own) & set(host)
    assert {k: id(p) for k, p in base.chunks[0].named_parameters()} == {
        k: id(p) for k, p in parameters.items()
    }
    assert equal([p.data for p in own], content)
    assert [t.parameter.data_ptr() for t in trained_tensors(base.chunks)] == adapters
    assert torch.equal(output(base), before)


def test_nothing_moves_where_the_host_is_the_device(base: BaseModel) -> None:
    weights = MovableBase(base.chunks, device=torch.device("cpu"))
    addresses = [p.data_ptr() for p in base.chunks[0].parameters()]
    weights.offload()
    with weights.resident():
        assert [p.data_ptr() for p in base.chunks[0].parameters()] == addresses
    assert [p.data_ptr() for p in base.chunks[0].parameters()] == addresses
