"""An adapter's factors as a rank reads them from a PEFT directory, and their sum with a weight."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from common.adapter import Layout
from common.peft_checks import lora_config
from common.peft_dir import CONFIG_FILE, WEIGHTS_FILE
from common.peft_names import MAGNITUDE, read_name
from rollout_svc.engine import Mismatch, MismatchReason
from rollout_svc.worker.weight_files import WeightFiles

_A, _B = Layout.LORA_A.value, Layout.LORA_B.value


@dataclass(frozen=True, slots=True)
class Factors:
    """One module's: `a` (rank, in), `b` (out, rank), with DoRA `magnitude` (out,)."""

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None

    @torch.no_grad()
    def add_to(self, weight: Tensor, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """W + scale B A in fp32, rounded once to `dtype`; W is (out, in), and stays as it is.

        DoRA (arXiv 2402.09353, equation 5): each row of it times magnitude / its norm.
        """
        summed = weight.to(device, torch.float32, copy=True)
        summed.addmm_(self.b.to(device).float(), self.a.to(device).float(), alpha=self.scale)
        if self.magnitude is not None:
            norms = torch.linalg.vector_norm(summed, dim=1)
            summed *= (self.magnitude.to(device) / norms).unsqueeze(1)
        return summed.to(dtype)


class PeftFactors(Mapping[str, Factors]):
    """Factors by module, which is named as in the base model: `model.layers.0.mlp.up_proj`.

    Raises:
        ConfigError: the configuration asks for what cannot be summed.
    """

    def __init__(self, path: Path) -> None:
        config = path / CONFIG_FILE
        self._lora = lora_config(config, json.loads(config.read_text()))
        self._file = path / WEIGHTS_FILE
        self._tensors = WeightFiles([self._file])
        self._names: dict[str, dict[str, str]] = {}
        self._others: list[str] = []
        for name in self._tensors:
            if parts := read_name(name):
                self._names.setdefault(parts.module, {})[parts.own_name] = name
            else:
                self._others.append(name)

    @property
    def digest(self) -> str:
        """BLAKE3 of the file's bytes, in hex."""
        return blake3().update_mmap(self._file).hexdigest()

    def __getitem__(self, module: str) -> Factors:
        names = self._names[module]
        return Factors(
            self._tensors[names[_A]],
            self._tensors[names[_B]],
            self._lora.scale_of(module),
            self._tensors[names[MAGNITUDE]] if MAGNITUDE in names else None,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def tensors(self, module: str) -> list[str]:
        """Names of a module's tensors in the file."""
        return list(self._names[module].values())

    def strangers(self) -> list[Mismatch]:
        """Tensors that are no factors."""
        return [Mismatch(name, MismatchReason.KIND, "no LoRA factor") for name in self._others]

    def misfits(self, module: str, shape: tuple[int, ...]) -> list[Mismatch]:
        """Tensors that do not fit a weight of `shape`, (out, in), or lack the others they need."""
        names, rank = self._names[module], self._lora.rank_of(module)
        expected = {_A: (rank, *shape[1:]), _B: (*shape[:1], rank)}
        if self._lora.use_dora:
            expected[MAGNITUDE] = shape[:1]
        if names.keys() != expected.keys():
            detail = f"its module has {_listed(names)} and needs {_listed(expected)}"
            return [Mismatch(name, MismatchReason.KIND, detail) for name in names.values()]
        return [
            Mismatch(name, MismatchReason.SHAPE, f"{found}, the module takes {expected[own]}")
            for own, name in names.items()
            if (found := self._tensors.shape(name)) != expected[own]
        ]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
