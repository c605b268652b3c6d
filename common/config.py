"""Configuration: a TOML file, then the environment, then the command line; later ones win."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from common.errors import ConfigError

ENV_PREFIX = "REFIT_"
_TYPO_RATIO = 0.7


class Config(pydantic.BaseModel):
    """Base of every configuration model: frozen, and an unknown key is an error."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )


ConfigT = TypeVar("ConfigT", bound=Config)


def load_config(
    model: type[ConfigT], path: Path | None, overrides: Mapping[str, str] | None = None
) -> ConfigT:
    """Read a configuration.

    Args:
        model: the service's configuration model.
        path: a TOML file, or None for defaults.
        overrides: dotted keys to values in TOML syntax, e.g. {"train.lr": "1e-4"}.

    The environment says `train.lr` as REFIT_TRAIN__LR.

    Raises:
        ConfigError: naming each key, what was found, and for an unknown key the nearest one.
    """
    values = _read_toml(path) if path else {}
    environment, overrides = _from_environment(model), dict(overrides or {})
    for key, text in (environment | overrides).items():
        _put(values, key, _parse(text))
    source = str(path) if path else "configuration"
    origins = dict.fromkeys(environment, "environment") | dict.fromkeys(overrides, "--set")
    return validate_config(model, values, source=source, origins=origins)


def validate_config(
    model: type[ConfigT],
    values: Mapping[str, Any],
    *,
    source: str,
    origins: Mapping[str, str] | None = None,
) -> ConfigT:
    """Validate plain values against a model, errors as one line a key.

    Args:
        source: where the values come from, but for the dotted keys in `origins`.
    """
    try:
        return model.model_validate(values)
    except pydantic.ValidationError as error:
        lines = []
        for item in error.errors():
            key = ".".join(map(str, item["loc"]))
            lines.append(f"{(origins or {}).get(key, source)}: {_explain(model, item)}")
        raise ConfigError("\n".join(lines)) from error


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"--config: {path} does not exist; give a TOML file") from error
    except OSError as error:
        raise ConfigError(f"--config: {path}: {error.strerror}; give a TOML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def _from_environment(model: type[Config]) -> dict[str, str]:
    """Variables whose first part is a key of this model; the others are another service's.

    Raises:
        ConfigError: a first part is nearly, but not quite, the name of a section of this model.
    """
    found: dict[str, str] = {}
    for name, value in os.environ.items():
        if not name.startswith(ENV_PREFIX):
            continue
        first, *rest = name.removeprefix(ENV_PREFIX).lower().split("__")
        if first in model.model_fields:
            found[".".join([first, *rest])] = value
        elif rest:
            _refuse_near_miss(model, name, first)
    return found


def _refuse_near_miss(model: type[Config], variable: str, first: str) -> None:
    near = difflib.get_close_matches(first, _sections(model), n=1, cutoff=_TYPO_RATIO)
    if near:
        right = ENV_PREFIX + near[0].upper() + variable[len(ENV_PREFIX) + len(first) :]
        raise ConfigError(f"{variable}: unknown section {first!r}; did you mean {right}?")


def _sections(model: type[Config]) -> list[str]:
    """Keys that have keys of their own."""
    return [
        name
        for name, field in model.model_fields.items()
        if typing.get_origin(field.annotation) is dict
        or (isinstance(field.annotation, type) and issubclass(field.annotation, pydantic.BaseModel))
    ]


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for depth, parent in enumerate(parents, 1):
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            section = ".".join(parents[:depth])
            raise ConfigError(
                f"{key}: {section} is set to {values!r}, no section; drop one of them"
            )
    values[last] = value


def _parse(text: str) -> Any:
    """A value in TOML syntax; text that is none stands for itself, so that paths need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(model: type[pydantic.BaseModel], error: Any) -> str:
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r}{_nearest(model, error['loc'])}"
    if error["type"] == "missing":
        return f"{key}: missing; it has no default"
    message = error["msg"].removeprefix("Value error, ")
    if not key:
        # Of several keys together; the message names them.
        return str(message)
    return f"{key}: found {error['input']!r}; {message[0].lower()}{message[1:]}"


def _nearest(model: type[pydantic.BaseModel], location: tuple[Any, ...]) -> str:
    fields: Mapping[str, Any] = model.model_fields
    for part in location[:-1]:
        inner = fields[part].annotation if part in fields else None
        if not (isinstance(inner, type) and issubclass(inner, pydantic.BaseModel)):
            return ""
        fields = inner.model_fields
    section = "".join(f"{part}." for part in location[:-1])
    return suggestion(str(location[-1]), fields, prefix=section)


def suggestion(found: str, known: Any, *, prefix: str = "") -> str:
    """ "; did you mean …" with the nearest known name, else the list of them."""
    near = difflib.get_close_matches(found, list(known), n=1, cutoff=0.5)
    if near:
        return f"; did you mean {prefix + near[0]!r}?"
    return f"; known are {', '.join(sorted(known))}"


def dump_toml(config: Config) -> str:
    """A configuration, defaults included, as TOML that `load_config` reads back."""
    return "".join(_toml_table(config.model_dump(mode="json", exclude_none=True), ""))


def _toml_table(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    for key, value in values.items():
        if key not in tables:
            yield f"{key} = {_toml_value(value)}\n"
    for key, table in tables.items():
        name = f"{prefix}{key}"
        yield f"\n[{name}]\n"
        yield from _toml_table(table, f"{name}.")


def _toml_value(value: Any) -> str:
    """JSON's scalars and arrays are TOML's as well, but for surrogate pairs and a bare DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
