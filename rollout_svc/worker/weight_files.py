"""The tensors of safetensors files by their names, mapped: one is read when it is used."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

_INDEX_FILE = "model.safetensors.index.json"


class WeightFiles(Mapping[str, Tensor]):
    """Looks up a tensor in whichever of the files holds it; the tensors map the files' pages.

    weights = WeightFiles.of_model(path)
    weights.shape("model.norm.weight"), weights["model.norm.weight"]
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._holders: dict[str, Any] = {}
        for file in files:
            holder: Any = safe_open(file, framework="pt")
            self._holders.update(dict.fromkeys(holder.keys(), holder))

    @classmethod
    def of_model(cls, path: Path) -> WeightFiles:
        """A model's directory: the files that its index names, or each `*.safetensors` of it.

        Raises:
            FileNotFoundError: it has none.
        """
        index = path / _INDEX_FILE
        if index.is_file():
            names = set(json.loads(index.read_text())["weight_map"].values())
            return cls(path / name for name in sorted(names))
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{path} has no *.safetensors; give a model's directory")
        return cls(files)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._holders[name].get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Read from the file's header alone."""
        return tuple(self._holders[name].get_slice(name).get_shape())

    def __iter__(self) -> Iterator[str]:
        return iter(self._holders)

    def __len__(self) -> int:
        return len(self._holders)

    def __contains__(self, name: object) -> bool:
        return name in self._holders
