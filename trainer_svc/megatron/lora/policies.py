"""Named adapters on one base: the one that trains, copies of it, and `reference`, the base alone.

verl-omni's lifecycle of policies; no second model is held for any of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor, nn

from common.errors import AdapterNotFound, AlreadyExists, Incompatible, InvalidField
from trainer_svc.megatron.lora.tensors import TrainedTensor, trained_tensors, wrapped_linears

DEFAULT = "default"
"""The adapter that trains."""

OLD = "old"
"""The adapter that follows it."""

REFERENCE = "reference"
"""All adapters off. It has no tensors, so nothing can be written to it."""


class PolicyAdapters:
    """The adapters of this rank's part of the model. Every rank makes the same calls.

        policies = PolicyAdapters(chunks, masters=optimizer.masters())
        policies.add_adapter("old")
        with policies.use_adapter("old"):
            ...
        policies.ema_update_adapter("default", "old", decay=0.99)

    Arithmetic is on float32 masters; a narrower parameter follows its master by one rounding.
    """

    def __init__(self, chunks: Sequence[GPTModel], *, masters: Mapping[str, Tensor]) -> None:
        """`masters` are those of `default`, by the names of its tensors, as the optimizer has them;
        it may be the parameters themselves."""
        self._chunks = chunks
        self._masters: dict[str, Mapping[str, Tensor]] = {DEFAULT: masters}

    @property
    def names(self) -> tuple[str, ...]:
        """Every policy that can be used; `reference` comes last."""
        return (*self._masters, REFERENCE)

    def masters(self, name: str) -> Mapping[str, Tensor]:
        """Float32 values of an adapter's tensors, by the names that `trained_tensors` gives.

        Raises:
            AdapterNotFound: no adapter is called so.
            InvalidField: it is `reference`, which has none.
        """
        if name == REFERENCE:
            raise InvalidField(f"adapter: {name} is the base alone, without tensors; name another")
        if name not in self._masters:
            raise AdapterNotFound(
                f"adapter: found {name}, there are {', '.join(self.names)}; add it or name another"
            )
        return self._masters[name]

    def add_adapter(self, name: str, *, like: str = DEFAULT) -> None:
        """Add an adapter with the values, and of the type, of another; it does not train.

        Raises:
            AlreadyExists: the name is taken.
            AdapterNotFound, InvalidField: `like` is none, or `name` cannot be one.
        """
        if name in self.names:
            raise AlreadyExists(f"adapter: {name} is there already; choose another name")
        if not name.isidentifier() or hasattr(nn.ModuleDict, name):
            raise InvalidField(f"adapter: {name!r} cannot be a name; use letters, digits and _")
        source = self.masters(like)
        linears = wrapped_linears(self._chunks)
        for adapters in {id(linear.adapters): linear.adapters for linear in linears}.values():
            adapters[name] = copy.deepcopy(adapters[like]).requires_grad_(False)
        self._masters[name] = {
            key: tensor.parameter.detach()
            if tensor.parameter.dtype is torch.float32
            else source[key].detach().clone()
            for key, tensor in self._tensors(name).items()
        }

    def use_adapter(self, name: str) -> AbstractContextManager[None]:
        """Compute with this policy in a `with` block; then with what was in use before.

        Raises:
            AdapterNotFound: no policy is called so.
        """
        if name != REFERENCE:
            self.masters(name)
        return self._active(None if name == REFERENCE else name)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Compute with the base alone in a `with` block: the policy `reference`."""
        return self.use_adapter(REFERENCE)

    def copy_adapter(self, source: str, target: str) -> None:
        """Set one adapter's values to another's.

        Raises:
            AdapterNotFound, InvalidField: one of them is none, or is `reference`.
            Incompatible: their tensors differ in name or shape.
        """
        self._blend(source, target, weight=1.0)

    def ema_update_adapter(self, source: str, target: str, *, decay: float) -> None:
        """target = decay * target + (1 - decay) * source.

        Raises:
            InvalidField: `decay` is not in [0, 1].
            AdapterNotFound, InvalidField, Incompatible: as `copy_adapter`.
        """
        if not 0 <= decay <= 1:
            raise InvalidField(f"decay: found {decay}; use a number from 0 to 1")
        self._blend(source, target, weight=1 - decay)

    @torch.no_grad()
    def set_values(self, name: str, values: Mapping[str, Tensor]) -> None:
        """Set an adapter's masters, by the names of its tensors; its parameters follow.

        Raises:
            AdapterNotFound, InvalidField: no adapter is called so, or it is `reference`.
        """
        masters = self.masters(name)
        for key, tensor in self._tensors(name).items():
            masters[key].copy_(values[key])
            tensor.parameter.copy_(masters[key])

    @torch.no_grad()
    def _blend(self, source: str, target: str, *, weight: float) -> None:
        found, wanted = self.masters(source), self.masters(target)
        _check_match(source, target, found, wanted)
        for key, tensor in self._tensors(target).items():
            wanted[key].lerp_(found[key], weight)
            tensor.parameter.copy_(wanted[key])

    @contextmanager
    def _active(self, name: str | None) -> Iterator[None]:
        before = [(linear, linear.active) for linear in wrapped_linears(self._chunks)]
        for linear, _ in before:
            linear.active = name
        try:
            yield
        finally:
            for linear, active in before:
                linear.active = active

    def _tensors(self, name: str) -> dict[str, TrainedTensor]:
        return {tensor.name: tensor for tensor in trained_tensors(self._chunks, adapter=name)}


def _check_match(
    source: str, target: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
) -> None:
    if odd := sorted(found.keys() ^ wanted.keys()):
        raise Incompatible(
            f"adapters: only one of {source} and {target} has {odd[0]} ({len(odd)} tensors "
            "differ); both must be on the same modules"
        )
    for key, value in found.items():
        if value.shape != wanted[key].shape:
            raise Incompatible(
                f"adapters: {key} has shape {tuple(value.shape)} in {source} and "
                f"{tuple(wanted[key].shape)} in {target}; give both the same rank"
            )
