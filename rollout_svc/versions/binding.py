"""Whether what was loaded found its place in the live model, on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.adapter import AdapterRef
from common.errors import Incompatible
from rollout_svc.engine import BoundReport, Mismatch, MismatchReason

_NAMED_TENSORS = 3


class Unbound(Incompatible):
    """Tensors have no place in the live model: `mismatches` says which, and why each."""

    def __init__(self, message: str, mismatches: Sequence[Mismatch]) -> None:
        super().__init__(message)
        self.mismatches = tuple(mismatches)


def refuse_unbound(ref: AdapterRef, reports: Iterable[BoundReport]) -> None:
    """A tensor counts as bound when every rank of one pipeline stage has taken it.

    Raises:
        Unbound: a tensor has no place.
        Incompatible: the engine refused the version, or its ranks did not read the same bytes.
    """
    reports = list(reports)
    if unbound := _unbound(reports):
        raise Unbound(
            f"adapter {ref}: {summary(unbound)}; train it on this replica's base model", unbound
        )
    if errors := [report.error for report in reports if report.error]:
        raise Incompatible(f"adapter {ref}: the engine refused it: {errors[0]}")
    if len(digests := {report.digest for report in reports}) > 1:
        raise Incompatible(
            f"adapter {ref}: its ranks read different bytes, of digests "
            f"{', '.join(sorted(digest[:12] or 'none' for digest in digests))}; give them one "
            "staging_dir"
        )


def summary(mismatches: Sequence[Mismatch]) -> str:
    """How many there are, and the first of them with the reasons."""
    named = ", ".join(map(str, mismatches[:_NAMED_TENSORS]))
    others = len(mismatches) - _NAMED_TENSORS
    more = f" and {others} more" if others > 0 else ""
    return f"{len(mismatches)} tensors found no module: {named}{more}"


def _unbound(reports: Iterable[BoundReport]) -> list[Mismatch]:
    """What some rank of every stage has not taken, in the order of the names."""
    stages: dict[int, dict[str, Mismatch]] = {}
    for report in reports:
        missed = stages.setdefault(report.stage, {})
        missed.update((mismatch.tensor, mismatch) for mismatch in report.mismatches)
    names = set.intersection(*(set(missed) for missed in stages.values()))
    return sorted(_reason(stages.values(), name) for name in names)


def _reason(stages: Iterable[dict[str, Mismatch]], tensor: str) -> Mismatch:
    """That of the stage which has the module: the others know only that they have not."""
    found = [missed[tensor] for missed in stages]
    return min(found, key=lambda mismatch: mismatch.reason is MismatchReason.NO_MODULE)
