"""What a replica takes: checked against a manifest before any byte of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from common.adapter import Dtype, ExpertLayout, Kind, Layout, LoraConfig, Manifest, TensorSpec
from common.errors import Incompatible
from common.peft_names import EXPERTS, TensorName, read_name
from rollout_svc.engine import Capabilities, Mismatch, MismatchReason
from rollout_svc.versions.binding import Unbound, summary


@dataclass(frozen=True, slots=True)
class Takes:
    """Which factors a slot takes, or the engine's own weights; no `max_rank` there."""

    target_modules: frozenset[str]
    layouts: frozenset[Layout]
    max_rank: int | None = None

    def mismatches(self, tensors: Iterable[TensorSpec], dtypes: frozenset[Dtype]) -> list[Mismatch]:
        """All tensors that it does not take, in their order."""
        found = ((spec, self._problem(spec, dtypes)) for spec in tensors)
        return [Mismatch(spec.name, *problem) for spec, problem in found if problem]

    def _problem(
        self, spec: TensorSpec, dtypes: frozenset[Dtype]
    ) -> tuple[MismatchReason, str] | None:
        parts = read_name(spec.name)
        if parts is None:
            return MismatchReason.KIND, "no factor of a linear layer, as PEFT names them"
        if spec.layout not in self.layouts:
            taken = ", ".join(sorted(layout.value for layout in self.layouts))
            return MismatchReason.KIND, f"layout {spec.layout.value}, taken here: {taken}"
        if spec.dtype not in dtypes:
            return MismatchReason.KIND, f"dtype {spec.dtype.value} is not taken"
        if (target := _target(parts)) not in self.target_modules:
            return MismatchReason.NOT_ADAPTED, f"{target} cannot take an adapter here"
        rank = _rank(spec)
        if self.max_rank is not None and rank is not None and rank > self.max_rank:
            return MismatchReason.RANK, f"rank {rank}, a slot takes up to {self.max_rank}"
        return None

    def problem(self, lora: LoraConfig) -> str:
        """What of the whole configuration it does not take: the field, and what to do."""
        if self.max_rank is not None and lora.rank > self.max_rank:
            return (
                f"rank: {lora.rank}, this replica takes up to {self.max_rank}; raise max_lora_rank"
            )
        if unknown := sorted(set(lora.target_modules) - self.target_modules):
            return (
                f"target_modules: {', '.join(unknown)} cannot take an adapter here; "
                f"these can: {', '.join(sorted(self.target_modules))}"
            )
        if lora.use_dora and Layout.MAGNITUDE not in self.layouts:
            return "use_dora: set, this replica serves no DoRA so; merge it, here or at the trainer"
        for field in ("rank_pattern", "alpha_pattern"):
            if getattr(lora, field):
                return (
                    f"{field}: set, replicas know one scale an adapter; multiply each B by its own "
                    "scale over alpha / rank"
                )
        return ""


@dataclass(frozen=True, slots=True)
class Limits:
    """What this replica takes, in a slot or into its weights; None: not so at all.

    `max_bytes` bounds one adapter, aliased tensors written out.
    """

    kinds: frozenset[Kind]
    dtypes: frozenset[Dtype]
    max_bytes: int
    slots: Takes | None
    merging: Takes | None = None

    @classmethod
    def of(cls, capabilities: Capabilities, *, max_bytes: int) -> Limits:
        slots, merging = capabilities, capabilities.merging
        return cls(
            kinds=frozenset(capabilities.kinds),
            dtypes=frozenset(capabilities.dtypes),
            max_bytes=max_bytes,
            slots=Takes(frozenset(slots.target_modules), frozenset(slots.layouts), slots.max_rank)
            if slots.max_loras
            else None,
            merging=Takes(frozenset(merging.target_modules), frozenset(merging.layouts))
            if merging
            else None,
        )

    def check(self, manifest: Manifest, *, merge: bool = False) -> None:
        """Before any byte is taken.

        Args:
            merge: an adapter is to be summed into the engine's weights.

        Raises:
            Unbound: an adapter has tensors that are not taken, or a configuration that is not.
            Incompatible: the rest, naming the field.
        """
        if manifest.kind not in self.kinds:
            raise Incompatible(
                f"manifest.kind: {manifest.kind.name}, this replica takes "
                f"{', '.join(sorted(kind.name for kind in self.kinds))}; set the trainer's merge "
                "to match"
            )
        size_bytes = sum(spec.size_bytes for spec in manifest.tensors)
        if size_bytes > self.max_bytes:
            raise Incompatible(
                f"manifest.tensors: {size_bytes} bytes, this replica takes up to "
                f"{self.max_bytes}; raise max_update_bytes"
            )
        if manifest.lora:
            self._check_adapter(manifest.tensors, lora=manifest.lora, merge=merge)
        for spec in manifest.tensors:
            if spec.dtype not in self.dtypes:
                raise Incompatible(f"tensor {spec.name}: dtype {spec.dtype.value} is not taken")

    def _check_adapter(
        self, tensors: tuple[TensorSpec, ...], *, lora: LoraConfig, merge: bool
    ) -> None:
        takes = self.merging if merge else self.slots
        if takes is None:
            found, other = ("ROLLOUT", "NEVER") if merge else ("NEVER", "ROLLOUT")
            raise Incompatible(
                f"manifest.merge: {found}, this replica serves {other} only; send so"
            )
        mismatches = takes.mismatches(tensors, self.dtypes)
        if problem := takes.problem(lora):
            raise Unbound(f"manifest.lora.{problem}", mismatches)
        if mismatches:
            raise Unbound(f"manifest: {summary(mismatches)}", mismatches)
        _check_factors(tensors, lora=lora)


def _target(parts: TensorName) -> str:
    """What `target_modules` calls the module."""
    whole = ExpertLayout.PER_EXPERT not in parts.layouts
    return EXPERTS if whole else parts.module.rpartition(".")[2]


def _rank(spec: TensorSpec) -> int | None:
    """A factor's rank; a tensor with all experts' factors does not say."""
    dimension = {Layout.LORA_A: 0, Layout.LORA_B: 1}.get(spec.layout)
    return None if dimension is None else spec.shape[dimension]


def _check_factors(tensors: Iterable[TensorSpec], *, lora: LoraConfig) -> None:
    """Every tensor is named as it is tagged; every module has both factors, of one rank."""
    modules: dict[str, dict[str, int]] = {}
    for spec, parts in _named(tensors):
        ranks = modules.setdefault(spec.name.removesuffix(f".{parts.leaf}"), {})
        if spec.layout is not Layout.MAGNITUDE:
            ranks[parts.own_name] = _checked_rank(spec, lora)
    for module, ranks in modules.items():
        if len(ranks) < 2:
            raise Incompatible(f"module {module}: has only one of lora_A and lora_B; send both")
        if len(set(ranks.values())) > 1:
            raise Incompatible(f"module {module}: {ranks} differ in rank; make them agree")


def _named(tensors: Iterable[TensorSpec]) -> Iterator[tuple[TensorSpec, TensorName]]:
    for spec in tensors:
        parts = read_name(spec.name)
        if parts is None or all(parts.layout(e) is not spec.layout for e in parts.layouts):
            raise Incompatible(
                f"tensor {spec.name}: tagged {spec.layout.value}, but not named so; use PEFT's "
                "names"
            )
        yield spec, parts


def _checked_rank(spec: TensorSpec, lora: LoraConfig) -> int:
    rank = lora.rank if (own := _rank(spec)) is None else own
    if rank > lora.rank:
        raise Incompatible(
            f"tensor {spec.name}: shape {spec.shape} has rank {rank}, the manifest says "
            f"{lora.rank}, which is the largest; make them agree"
        )
    return rank
