"""What Hugging Face's model makes of an adapter: with real PEFT, and with plain formulas on its
weights where PEFT has no such adapter. Tensors go by `TrainedTensor`'s names and are whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from tests import tiny_models
from trainer_svc.megatron.lora.plan import AdapterPlan, Pair, Site
from trainer_svc.megatron.model import names
from trainer_svc.megatron.model.base_config import BaseConfig


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one row of tokens: logits (T, vocab), mean next-token loss, gradients by name."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of tokens (T,) under the logits (T, vocab) before each."""
    return cross_entropy(logits[:-1], tokens[1:])


def with_peft(
    model_dir: Path,
    *,
    base: BaseConfig,
    plan: AdapterPlan,
    values: Mapping[str, Tensor],
    tokens: Tensor,
) -> Outcome:
    """PEFT's outcome: on linears, and by `target_parameters` on experts and routers."""
    plain = tiny_models.load(model_dir)
    # PEFT would take a dense `gate_proj` in a model with experts for the experts' own.
    plain.config.update({"model_type": "llama"})
    model: Any = get_peft_model(plain, _peft_config(plan))
    slots = dict(_slots(model, plan, base))
    assert slots.keys() == values.keys()
    for name, slot in slots.items():
        slot.write(values[name])
    logits = model(tokens[None]).logits[0]
    loss = next_token_loss(logits, tokens)
    torch.autograd.backward(loss)
    return Outcome(logits.detach(), loss.detach(), {n: s.gradient() for n, s in slots.items()})


def with_formulas(
    model_dir: Path,
    *,
    base: BaseConfig,
    plan: AdapterPlan,
    values: Mapping[str, Tensor],
    tokens: Tensor,
) -> Outcome:
    """The outcome of W + scale B A, or DoRA's of it, in the place of every adapted weight W."""
    model = tiny_models.load(model_dir).requires_grad_(False)
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    weights: dict[str, Tensor] = dict(model.named_parameters())
    for site, number, pair in plan.pairs():
        parts = [leaves.get(f"{site.name}.{number}.{x}") for x in ("lora_a", "lora_b", "magnitude")]
        _adapt(weights, site, pair, parts, base=base)
    logits = functional_call(model, weights, (tokens[None],)).logits[0]
    loss = next_token_loss(logits, tokens)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return Outcome(logits.detach(), loss.detach(), dict(zip(leaves, gradients, strict=True)))


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where PEFT keeps one tensor: in a part of one parameter, or of one each projection."""

    parameters: Sequence[nn.Parameter]
    view: Callable[[Tensor], Tensor]
    split: Callable[[Tensor], Sequence[Tensor]]
    """Into what each projection holds."""

    fuse: Callable[[Sequence[Tensor]], Tensor]
    """Gradients of all projections into the tensor's: inverse of `split`, or a sum."""

    def write(self, value: Tensor) -> None:
        for parameter, part in zip(self.parameters, self.split(value), strict=True):
            self.view(parameter.data).copy_(part)

    def gradient(self) -> Tensor:
        return self.fuse([self.view(_gradient(parameter)) for parameter in self.parameters])


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _is_linear(site: Site) -> bool:
    """Whether Hugging Face has a module of its own for it."""
    return not site.linear.is_expert and site.linear.own_name != "router"


def _parameters(site: Site, pair: Pair) -> list[str]:
    """Hugging Face's parameters that a pair changes."""
    prefix = f"model.layers.{site.layer}."
    if _is_linear(site):
        return [f"{prefix}{projection.name}.weight" for projection in pair.projections]
    if site.linear.is_expert:
        stack = "down_proj" if site.linear.own_name == "linear_fc2" else "gate_up_proj"
        return [f"{prefix}mlp.experts.{stack}"]
    return [f"{prefix}mlp.gate.weight"]


def _peft_config(plan: AdapterPlan) -> LoraConfig:
    modules: dict[str, Pair] = {}
    parameters: set[str] = set()
    for site, _, pair in plan.pairs():
        changed = _parameters(site, pair)
        if _is_linear(site):
            modules |= {name.removesuffix(".weight"): pair for name in changed}
        else:
            parameters |= set(changed)
    return LoraConfig(
        r=plan.settings.rank,
        lora_alpha=plan.settings.alpha,  # type: ignore[arg-type]
        use_rslora=plan.settings.use_rslora,
        use_dora=plan.settings.type == "dora",
        target_modules=list(modules),
        target_parameters=sorted(parameters),
        rank_pattern={re.escape(name): pair.rank for name, pair in modules.items()},
        alpha_pattern={re.escape(name): pair.alpha for name, pair in modules.items()},
    )


def _slots(model: Any, plan: AdapterPlan, base: BaseConfig) -> Iterator[tuple[str, _Slot]]:
    wrappers = {
        f"{name.replace('.base_layer', '')}.{module.parameter_name}": module
        for name, module in model.base_model.model.named_modules()
        if isinstance(module, ParamWrapper)
    }
    for site, number, pair in plan.pairs():
        parameters = _parameters(site, pair)
        if _is_linear(site):
            modules = [
                model.base_model.model.get_submodule(name.removesuffix(".weight"))
                for name in parameters
            ]
            slots = _slots_of_linears(modules, site, base)
        else:
            slots = _slots_of_parameter(wrappers[parameters[0]], site, pair)
        yield from ((f"{site.name}.{number}.{leaf}", slot) for leaf, slot in slots.items())


def _slots_of_linears(modules: list[Any], site: Site, base: BaseConfig) -> dict[str, _Slot]:
    fused = len(modules) > 1

    def split(value: Tensor) -> Sequence[Tensor]:
        return names.split(site.linear.fusion, value, heads=base.heads) if fused else [value]

    def fuse(parts: Sequence[Tensor]) -> Tensor:
        return names.fuse(site.linear.fusion, parts, heads=base.heads) if fused else parts[0]

    def slot(keeper: str, *, is_a: bool) -> _Slot:
        parameters = [getattr(module, keeper)["default"].weight for module in modules]
        if is_a:
            return _Slot(parameters, _same, lambda value: [value] * len(modules), _sum)
        return _Slot(parameters, _same, split, fuse)

    slots = {"lora_a": slot("lora_A", is_a=True), "lora_b": slot("lora_B", is_a=False)}
    if modules[0].use_dora["default"]:
        slots["magnitude"] = slot("lora_magnitude_vector", is_a=False)
    return slots


def _slots_of_parameter(wrapper: Any, site: Site, pair: Pair) -> dict[str, _Slot]:
    """A is (experts * r, in), expert-major; B (out, r * experts), expert-minor."""
    experts, expert = wrapper.num_experts, site.expert or 0

    def slot(keeper: str, view: Callable[[Tensor], Tensor]) -> _Slot:
        parameters = [getattr(wrapper, keeper)["default"].weight]
        return _Slot(parameters, view, lambda value: [value], lambda parts: parts[0])

    return {
        "lora_a": slot("lora_A", lambda t: t.view(experts, pair.rank, -1)[expert]),
        "lora_b": slot("lora_B", lambda t: t.view(-1, pair.rank, experts)[..., expert]),
    }


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


def _adapt(
    weights: dict[str, Tensor],
    site: Site,
    pair: Pair,
    values: Sequence[Tensor | None],
    *,
    base: BaseConfig,
) -> None:
    """Replace the weights that a pair changes by their formula's."""
    a, b, magnitude = values
    assert a is not None and b is not None
    fusion, fused = site.linear.fusion, len(pair.projections) > 1
    if site.linear.is_expert:
        (name,) = _parameters(site, pair)
        stack = weights[name].clone()
        first = pair.out_features if pair.projections[0].canonical == "linear_fc1_up" else 0
        rows = slice(first, first + pair.out_features)
        for expert in range(len(stack)) if site.expert is None else [site.expert]:
            stack[expert, rows] = _changed(stack[expert, rows].clone(), a, b, magnitude, pair.scale)
        weights[name] = stack
        return
    parts = len(pair.projections)
    lora_bs = names.split(fusion, b, heads=base.heads) if fused else [b]
    if magnitude is None:
        magnitudes: Sequence[Tensor | None] = [None] * parts
    else:
        magnitudes = names.split(fusion, magnitude, heads=base.heads) if fused else [magnitude]
    for name, lora_b, of_rows in zip(_parameters(site, pair), lora_bs, magnitudes, strict=True):
        weights[name] = _changed(weights[name], a, lora_b, of_rows, pair.scale)


def _changed(
    weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor | None, scale: float
) -> Tensor:
    changed: Tensor = weight + scale * b @ a
    if magnitude is None:
        return changed
    # Section 4.3 of arXiv 2402.09353: no gradient goes through the norm.
    factor: Tensor = magnitude / changed.detach().norm(dim=1)
    return changed * factor.unsqueeze(1)
