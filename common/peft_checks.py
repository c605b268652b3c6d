"""What an adapter's configuration must be, whoever gives it, to be trained on or served.

`source` stands at the head of every message: a file's path, or the name of an argument.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from common.adapter import LoraConfig
from common.errors import ConfigError
from common.peft_names import EXPERT_PARAMETERS, EXPERTS

BASE_CHANGING_INITS = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Initialisations that change the base weights; their factors are relative to the changed ones."""

_UNKNOWN = (
    *("modules_to_save", "lora_bias", "layer_replication", "alora_invocation_tokens"),
    *("use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config"),
)
"""Keys of PEFT's configuration that ask for something else than factors on an unchanged base."""


_ROUTER = "gate.weight"
"""What PEFT calls a router in `target_parameters`."""


def lora_config(source: object, config: Mapping[str, Any]) -> LoraConfig:
    """The part of an adapter_config.json that makes an adapter.

    Raises:
        ConfigError: it is malformed, or asks for what this system does not have.
    """
    _check_kind(source, config)
    return LoraConfig(
        rank=_rank(source, "r", config.get("r")),
        alpha=_alpha(source, "lora_alpha", config.get("lora_alpha")),
        target_modules=_targets(source, config),
        use_rslora=bool(config.get("use_rslora", False)),
        use_dora=bool(config.get("use_dora", False)),
        rank_pattern=tuple(
            (key, _rank(source, f"rank_pattern[{key!r}]", value))
            for key, value in _pattern(source, config, "rank_pattern")
        ),
        alpha_pattern=tuple(
            (key, _alpha(source, f"alpha_pattern[{key!r}]", value))
            for key, value in _pattern(source, config, "alpha_pattern")
        ),
    )


def _check_kind(source: object, config: Mapping[str, Any]) -> None:
    for key in _UNKNOWN:
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


def _rank(source: object, key: str, found: object) -> int:
    if type(found) is not int or found < 1:
        raise ConfigError(f"{source}: {key} = {found!r}; a LoRA rank is a whole number above 0")
    return found


def _alpha(source: object, key: str, found: Any) -> float:
    if type(found) not in (int, float) or not 0 < found <= sys.float_info.max:
        raise ConfigError(f"{source}: {key} = {found!r}; it must be above 0, and finite")
    alpha: float = found
    return alpha


def _targets(source: object, config: Mapping[str, Any]) -> tuple[str, ...]:
    parameters = _names(source, "target_parameters", config.get("target_parameters") or [])
    given = config.get("target_modules")
    modules = _names(source, "target_modules", [] if given is None and parameters else given)
    if not modules and not parameters:
        raise ConfigError(f"{source}: target_modules = {given!r}; give the list of projections")
    for parameter in parameters:
        if not parameter.endswith((*EXPERT_PARAMETERS, _ROUTER)):
            raise ConfigError(
                f"{source}: target_parameters has {parameter!r}; only those of experts and routers "
                "can be adapted"
            )
    experts = [EXPERTS] if any(p.endswith(EXPERT_PARAMETERS) for p in parameters) else []
    routers = ["gate"] if any(p.endswith(_ROUTER) for p in parameters) else []
    return tuple(sorted({*modules, *experts, *routers}))


def _names(source: object, key: str, found: object) -> list[str]:
    if not isinstance(found, list) or not all(type(name) is str for name in found):
        raise ConfigError(f"{source}: {key} = {found!r}; give the list of projections")
    return found


def _pattern(source: object, config: Mapping[str, Any], key: str) -> list[tuple[str, object]]:
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{source}: {key} = {found!r}; give an object of numbers by module")
    for module in found:
        try:
            re.compile(module)
        except re.error as error:
            raise ConfigError(f"{source}: {key} has {module!r}, which is no pattern") from error
    return list(found.items())


def check_served(source: object, lora: LoraConfig, *, dora: bool = False) -> None:
    """Raises `ConfigError` where no replica can serve an adapter as it is published.

    Args:
        dora: it may be summed into a replica's weights; no LoRA slot takes a magnitude.
    """
    for key in ("use_dora", "rank_pattern", "alpha_pattern"):
        if (found := getattr(lora, key)) and not (dora and key == "use_dora"):
            given = dict(found) if isinstance(found, tuple) else found
            raise ConfigError(f"{source}: {key} = {given!r} cannot be served; remove it")
