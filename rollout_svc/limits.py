"""What a replica takes: checked against a manifest before any byte of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.adapter import Dtype, Kind, Layout, LoraConfig, Manifest, TensorSpec
from common.errors import Incompatible
from common.peft_names import read_name


@dataclass(frozen=True, slots=True)
class Limits:
    """What this replica takes; `max_bytes` bounds one adapter, aliased tensors written out."""

    kinds: frozenset[Kind]
    layouts: frozenset[Layout]
    max_rank: int
    target_modules: frozenset[str]
    dtypes: frozenset[Dtype]
    max_bytes: int

    def check(self, manifest: Manifest) -> None:
        """Raises `Incompatible` naming the field, before any byte is taken."""
        if manifest.kind not in self.kinds:
            raise Incompatible(
                f"manifest.kind: {manifest.kind.name}, this replica takes "
                f"{', '.join(sorted(kind.name for kind in self.kinds))}; set the trainer's merge "
                "to match"
            )
        if manifest.lora:
            self._check_lora(manifest.lora)
        size_bytes = sum(spec.size_bytes for spec in manifest.tensors)
        if size_bytes > self.max_bytes:
            raise Incompatible(
                f"manifest.tensors: {size_bytes} bytes, this replica takes up to "
                f"{self.max_bytes}; raise max_update_bytes"
            )
        for spec in manifest.tensors:
            if spec.dtype not in self.dtypes:
                raise Incompatible(f"tensor {spec.name}: dtype {spec.dtype.value} is not taken")
        if manifest.lora:
            self._check_layouts(manifest.tensors)
            _check_factors(manifest.tensors, lora=manifest.lora)

    def _check_lora(self, lora: LoraConfig) -> None:
        if lora.rank > self.max_rank:
            raise Incompatible(
                f"manifest.lora.rank: {lora.rank}, this replica takes up to {self.max_rank}; "
                "raise max_lora_rank"
            )
        if unknown := sorted(set(lora.target_modules) - self.target_modules):
            raise Incompatible(
                f"manifest.lora.target_modules: {', '.join(unknown)} cannot take an adapter here; "
                f"these can: {', '.join(sorted(self.target_modules))}"
            )
        for field in ("rank_pattern", "alpha_pattern"):
            if getattr(lora, field):
                raise Incompatible(
                    f"manifest.lora.{field}: set, replicas know one scale an adapter; multiply "
                    "each B by its own scale over alpha / rank"
                )

    def _check_layouts(self, tensors: Iterable[TensorSpec]) -> None:
        for spec in tensors:
            if spec.layout not in self.layouts:
                raise Incompatible(
                    f"tensor {spec.name}: layout {spec.layout.value}, this replica takes "
                    f"{', '.join(sorted(layout.value for layout in self.layouts))}; send those"
                )


def _check_factors(tensors: Iterable[TensorSpec], *, lora: LoraConfig) -> None:
    """Every tensor is named as it is tagged; every module has both factors, of one rank."""
    modules: dict[str, dict[str, int]] = {}
    for spec in tensors:
        parts = read_name(spec.name)
        if parts is None or all(parts.layout(e) is not spec.layout for e in parts.layouts):
            raise Incompatible(
                f"tensor {spec.name}: tagged {spec.layout.value}, but not named so; use PEFT's "
                "names"
            )
        ranks = modules.setdefault(spec.name.removesuffix(f".{parts.leaf}"), {})
        if spec.layout is not Layout.MAGNITUDE:
            ranks[parts.own_name] = _rank(spec, lora)
    for module, ranks in modules.items():
        if len(ranks) < 2:
            raise Incompatible(f"module {module}: has only one of lora_A and lora_B; send both")
        if len(set(ranks.values())) > 1:
            raise Incompatible(f"module {module}: {ranks} differ in rank; make them agree")


def _rank(spec: TensorSpec, lora: LoraConfig) -> int:
    """A factor's rank; of a tensor with all experts' factors the manifest's: it does not say."""
    dimension = {Layout.LORA_A: 0, Layout.LORA_B: 1}.get(spec.layout)
    rank = lora.rank if dimension is None else spec.shape[dimension]
    if rank > lora.rank:
        raise Incompatible(
            f"tensor {spec.name}: shape {spec.shape} has rank {rank}, the manifest says "
            f"{lora.rank}, which is the largest; make them agree"
        )
    return rank
