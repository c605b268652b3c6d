"""What a replica takes: checked against a manifest before any byte of it."""

from __future__ import annotations

from dataclasses import dataclass

from common.adapter import Dtype, Layout, Manifest
from common.errors import Incompatible


@dataclass(frozen=True, slots=True)
class Limits:
    """What this replica takes; `max_bytes` bounds one adapter, aliased tensors written out."""

    base_fingerprint: str
    max_rank: int
    target_modules: frozenset[str]
    dtypes: frozenset[Dtype]
    max_bytes: int

    def check(self, manifest: Manifest) -> None:
        """Raises `Incompatible` naming the field, before any byte is taken."""
        lora = manifest.lora
        if manifest.base_fingerprint != self.base_fingerprint:
            raise Incompatible(
                f"manifest.base_fingerprint: {manifest.base_fingerprint[:12]}, this replica serves "
                f"{self.base_fingerprint[:12]}; start both on the same base model"
            )
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
        size_bytes = sum(spec.size_bytes for spec in manifest.tensors)
        if size_bytes > self.max_bytes:
            raise Incompatible(
                f"manifest.tensors: {size_bytes} bytes, this replica takes up to "
                f"{self.max_bytes}; raise max_update_bytes"
            )
        self._check_tensors(manifest)

    def _check_tensors(self, manifest: Manifest) -> None:
        factors: dict[str, set[Layout]] = {}
        for spec in manifest.tensors:
            if spec.dtype not in self.dtypes:
                raise Incompatible(f"tensor {spec.name}: dtype {spec.dtype.value} is not taken")
            rank = spec.shape[0] if spec.layout is Layout.LORA_A else spec.shape[1]
            if rank != manifest.lora.rank:
                raise Incompatible(
                    f"tensor {spec.name}: shape {spec.shape} has rank {rank}, the manifest says "
                    f"{manifest.lora.rank}; ranks must be the same throughout"
                )
            module, mark, rest = spec.name.rpartition(f".{spec.layout.value}.")
            if not mark or rest != "weight":
                raise Incompatible(
                    f"tensor {spec.name}: tagged {spec.layout.value}, but not named so; use PEFT's "
                    "names"
                )
            factors.setdefault(module, set()).add(spec.layout)
        if lone := [module for module, found in factors.items() if len(found) != len(Layout)]:
            raise Incompatible(f"module {lone[0]}: has only one of lora_A and lora_B; send both")
