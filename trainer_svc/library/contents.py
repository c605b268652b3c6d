"""A state dict and its LoRA configuration, checked and laid out; torch is imported when it came."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from common.adapter import Dtype, LoraConfig, TensorEntry, TensorSpec, plan
from common.errors import ConfigError, StagingFull
from common.peft_checks import check_served, lora_config
from common.peft_dir import peft_config
from common.peft_names import MAGNITUDE
from common.peft_tensors import check_pairs, lora_factor

_WIRE_NAMES = {"float32": Dtype.FLOAT32, "bfloat16": Dtype.BFLOAT16, "float16": Dtype.FLOAT16}
_FACTOR = re.compile(
    r"(?P<module>.+\.(?P<projection>[^.]+))\."
    r"((?P<factor>lora_[AB])(\.[^.]+)?\.weight|lora_magnitude_vector(\.[^.]+){0,2})"
)


@dataclass(frozen=True, slots=True)
class Contents:
    """What one call of `publish` publishes: `tensors` holds the caller's own, by PEFT name."""

    lora: LoraConfig
    specs: tuple[TensorSpec, ...]
    tensors: Mapping[str, Any]

    @property
    def total_bytes(self) -> int:
        """Size of the flat buffer."""
        return sum(spec.size_bytes for spec in self.specs if not spec.alias_of)

    def write(self, file: int) -> None:
        """Append the flat buffer to an open file: the one copy that a publish makes.

        Raises:
            StagingFull: there is no memory for it.
        """
        try:
            for spec in self.specs:
                if not spec.alias_of:
                    _write_all(file, _bytes_of(self.tensors[spec.name]))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise StagingFull(
                f"publish: {self.total_bytes} bytes of memory for the adapter are not free; "
                "free some, or keep fewer versions"
            ) from error


def read_contents(state_dict: Mapping[str, Any], config: object, *, dora: bool = False) -> Contents:
    """Check an adapter that is to be published.

    Args:
        state_dict: torch tensors or numpy arrays by PEFT name, with the adapter's name before
            ".weight" or without. Tensors that share their memory travel once.
        config: a `peft.LoraConfig`, the keys of an adapter_config.json, or Refit's `LoraConfig`.
        dora: replicas may sum it into their weights, so that DoRA can be served.

    Raises:
        ConfigError: it cannot be served; the key or the tensor is named.
    """
    tensors, projections = _by_peft_name(state_dict)
    # PEFT takes patterns and paths as targets as well; the tensors say which projections they met.
    lora = lora_config("lora_config", _peft_keys(config) | {"target_modules": sorted(projections)})
    check_served("lora_config", lora, dora=dora)
    entries = [
        lora_factor("state_dict", name, dtype=_dtype(tensor), shape=list(tensor.shape), lora=lora)
        for name, tensor in tensors.items()
    ]
    check_pairs("state_dict", entries, use_dora=lora.use_dora)
    return Contents(lora, plan(_aliased(entries, tensors)), tensors)


def _by_peft_name(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    if not isinstance(state_dict, Mapping):
        raise ConfigError(
            f"state_dict: found a {type(state_dict).__name__}; give a dict of tensors by name"
        )
    found: dict[str, str] = {}
    projections: set[str] = set()
    for key, value in state_dict.items():
        _check_types(key, value)
        match = _FACTOR.fullmatch(key)
        if match is None:
            raise ConfigError(
                f"state_dict: {key!r} is no LoRA factor; publish only keys like "
                "'….q_proj.lora_A.weight', as peft.get_peft_model_state_dict gives them"
            )
        factor = match["factor"]
        name = f"{match['module']}.{f'{factor}.weight' if factor else MAGNITUDE}"
        if name in found:
            raise ConfigError(
                f"state_dict: {found[name]!r} and {key!r} are two adapters' {name!r}; "
                "publish one adapter at a time"
            )
        found[name] = key
        projections.add(match["projection"])
    if not found:
        raise ConfigError("state_dict: holds no tensor; give the adapter's lora_A and lora_B")
    return {name: state_dict[key] for name, key in found.items()}, projections


def _check_types(key: object, value: object) -> None:
    if not isinstance(key, str):
        raise ConfigError(
            f"state_dict: key {key!r} is of type {type(key).__name__}; "
            "give tensors by their PEFT names"
        )
    # Not `torch.Tensor`: torch is not imported where only arrays are published.
    if not isinstance(value, np.ndarray) and not hasattr(value, "data_ptr"):
        raise ConfigError(
            f"state_dict: {key!r} is of type {type(value).__name__}; "
            "give a torch tensor or numpy array"
        )


def _peft_keys(config: object) -> dict[str, Any]:
    if isinstance(config, LoraConfig):
        return peft_config(config, "")
    if isinstance(config, Mapping):
        return dict(config)
    to_dict = getattr(config, "to_dict", None)
    if to_dict is None:
        raise ConfigError(
            f"lora_config: found a {type(config).__name__}; give the peft.LoraConfig, or a dict "
            "with the keys of adapter_config.json"
        )
    return dict(to_dict())


def _dtype(tensor: Any) -> object:
    """The type's name in a safetensors header, or for others the one that its library has."""
    name = getattr(tensor.dtype, "name", str(tensor.dtype).removeprefix("torch."))
    return _WIRE_NAMES[name].value if name in _WIRE_NAMES else name


def _aliased(entries: Iterable[TensorEntry], tensors: Mapping[str, Any]) -> Iterable[TensorEntry]:
    """Entries of tensors that are views of the same memory, as aliases of the first of them."""
    first_at: dict[tuple[object, ...], str] = {}
    for entry in entries:
        key = (entry.layout, entry.dtype, entry.shape, *_place(tensors[entry.name]))
        first = first_at.setdefault(key, entry.name)
        yield replace(entry, alias_of="" if first == entry.name else first)


def _place(tensor: Any) -> tuple[object, ...]:
    if isinstance(tensor, np.ndarray):
        return "numpy", tensor.ctypes.data, tensor.strides, tensor.dtype.byteorder
    return str(tensor.device), tensor.data_ptr(), tensor.stride()


def _bytes_of(tensor: Any) -> memoryview:
    """The elements, little-endian and row-major; a copy only where they do not lie so."""
    if isinstance(tensor, np.ndarray):
        little = tensor.astype(tensor.dtype.newbyteorder("<"), copy=False)
        return np.ascontiguousarray(little).view(np.uint8).data.cast("B")
    import torch

    flat = tensor.detach().cpu().contiguous().view(torch.uint8)
    return memoryview(flat.numpy()).cast("B")


def _write_all(file: int, content: memoryview) -> None:
    while content:
        content = content[os.write(file, content) :]
