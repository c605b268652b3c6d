"""What makes an adapter one that replicas can serve, whoever describes it.

`source` stands at the head of every message: a file's path, or the name of an argument.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from common.adapter import Dtype, Layout, LoraConfig, TensorEntry
from common.errors import ConfigError

BASE_CHANGING_INITS = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Initialisations that change the base weights; their factors are relative to the changed ones."""

_UNSERVED = (
    *("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias"),
    *("layer_replication", "alora_invocation_tokens", "use_qalora", "use_bdlora"),
    *("arrow_config", "kasa_config", "monteclora_config"),
)
"""Keys of PEFT's configuration that ask for more than two factors a module on an unchanged base."""


def lora_config(source: object, config: Mapping[str, Any]) -> LoraConfig:
    """The part of an adapter_config.json that inference needs.

    Raises:
        ConfigError: it is malformed, or vLLM's LoRA slots cannot serve it.
    """
    _check_kind(source, config)
    rank, alpha, targets = (config.get(key) for key in ("r", "lora_alpha", "target_modules"))
    if type(rank) is not int or rank < 1:
        raise ConfigError(f"{source}: r = {rank!r}; a LoRA rank is a whole number of at least 1")
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if alpha is None or not is_number or not 0 < alpha <= sys.float_info.max:
        raise ConfigError(f"{source}: lora_alpha = {alpha!r}; it must be above 0, and finite")
    if not isinstance(targets, list) or not targets or not all(type(t) is str for t in targets):
        raise ConfigError(f"{source}: target_modules = {targets!r}; give the list of projections")
    return LoraConfig(rank, alpha, tuple(sorted(targets)), bool(config.get("use_rslora", False)))


def _check_kind(source: object, config: Mapping[str, Any]) -> None:
    for key in _UNSERVED:
        if config.get(key):
            raise ConfigError(f"{source}: {key} = {config[key]!r} cannot be served; remove it")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"{source}: bias = {config['bias']!r} cannot be served; use 'none'")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(BASE_CHANGING_INITS):
        raise ConfigError(
            f"{source}: init_lora_weights = {init!r} changes the base weights, which replicas "
            "never receive; convert the adapter to plain LoRA as PEFT documents it"
        )


def lora_factor(
    source: object, name: str, *, dtype: object, shape: object, rank: int
) -> TensorEntry:
    """One tensor by its PEFT name; `dtype` as in a safetensors header, `shape` a list of sizes.

    Raises:
        ConfigError: it is no A or B of a module, or not of this rank.
    """
    layout = next((part for part in Layout if name.endswith(f".{part.value}.weight")), None)
    if layout is None:
        raise ConfigError(
            f"{source}: tensor {name!r} is no LoRA factor; "
            "only names that end in .lora_A.weight or .lora_B.weight can be served"
        )
    sizes = _sizes(source, name, shape)
    own = sizes[0] if layout is Layout.LORA_A else sizes[1]
    if own != rank:
        raise ConfigError(
            f"{source}: tensor {name!r} has shape {shape!r}, of rank {own}, but r = {rank} in "
            "its configuration; make them agree"
        )
    return TensorEntry(name, _dtype(source, name, dtype), sizes, layout)


def _dtype(source: object, name: str, found: object) -> Dtype:
    try:
        return Dtype(found)
    except ValueError as error:
        known = ", ".join(part.value for part in Dtype)
        raise ConfigError(f"{source}: tensor {name!r} has dtype {found!r}; use {known}") from error


def _sizes(source: object, name: str, found: object) -> tuple[int, int]:
    sizes = naturals(found)
    if len(sizes) != 2 or 0 in sizes:
        raise ConfigError(
            f"{source}: tensor {name!r} has shape {found!r}; a LoRA factor has two sizes above 0"
        )
    return sizes[0], sizes[1]


def naturals(found: object) -> tuple[int, ...]:
    """A list of whole numbers from 0 up; what is none is empty."""
    fits = isinstance(found, list) and all(type(n) is int and n >= 0 for n in found)
    return tuple(found) if fits and isinstance(found, list) else ()


def check_pairs(source: object, entries: Iterable[TensorEntry]) -> None:
    """Every module has both factors. Raises `ConfigError` with the one that has not."""
    layouts: dict[str, list[Layout]] = {}
    for entry in entries:
        module = entry.name.removesuffix(f".{entry.layout.value}.weight")
        layouts.setdefault(module, []).append(entry.layout)
    for module, found in layouts.items():
        if len(found) == 1:
            raise ConfigError(
                f"{source}: {module!r} has only {found[0].value}; save both lora_A and lora_B of it"
            )
