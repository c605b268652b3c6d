"""A Hugging Face `config.json`, read with errors that name the key. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HfConfig:
    """The keys of one object of a `config.json`; `source` says which, in messages."""

    source: str
    keys: dict[str, Any]

    @staticmethod
    def read(model_dir: Path) -> HfConfig:
        """Raises ConfigError where there is no such file, or no JSON in it."""
        path = model_dir / "config.json"
        if not path.is_file():
            raise ConfigError(f"model_dir: found no {path}; give a Hugging Face model directory")
        try:
            return HfConfig(str(path), json.loads(path.read_text()))
        except ValueError as error:
            raise ConfigError(
                f"{path}: found no JSON ({error}); download the model again"
            ) from error

    def get(self, *names: str, default: Any = None) -> Any:
        """Value of the first of these keys that is there and not null."""
        found = (self.keys.get(name) for name in names)
        return next((value for value in found if value is not None), default)

    def need(self, *names: str) -> Any:
        """Like `get`.

        Raises:
            ConfigError: none is there.
        """
        value = self.get(*names)
        if value is None:
            raise ConfigError(
                f"{self.source}: found no {' or '.join(names)}; this architecture needs it"
            )
        return value

    def allow(self, name: str, *implemented: Any) -> Any:
        """Value of a key, which may be missing.

        Raises:
            ConfigError: it is none of `implemented`.
        """
        value = self.get(name)
        if value is not None and value not in implemented:
            known = ", ".join(map(str, implemented)) or "null"
            raise ConfigError(
                f"{self.source}: {name} is {value}; implemented: {known}; choose another model"
            )
        return value
