"""Whether what was loaded found its place in the live model, on every rank."""

from __future__ import annotations

from collections.abc import Iterable

from common.adapter import AdapterRef
from common.errors import Incompatible
from rollout_svc.engine import BoundReport

_NAMED_TENSORS = 3


def refuse_unbound(ref: AdapterRef, reports: Iterable[BoundReport]) -> None:
    """A tensor counts as bound when every rank of one pipeline stage has taken it.

    Raises:
        Incompatible: the engine refused the version, or a tensor found no module.
    """
    reports = list(reports)
    if errors := [report.error for report in reports if report.error]:
        raise Incompatible(f"adapter {ref}: the engine refused it: {errors[0]}")
    stages: dict[int, set[str]] = {}
    for report in reports:
        stages.setdefault(report.stage, set()).update(report.unbound)
    unbound = sorted(set.intersection(*stages.values()))
    if unbound:
        more = f" and {len(unbound) - _NAMED_TENSORS} more" if len(unbound) > _NAMED_TENSORS else ""
        raise Incompatible(
            f"adapter {ref}: {len(unbound)} tensors found no module: "
            f"{', '.join(unbound[:_NAMED_TENSORS])}{more}; train it on this replica's base model"
        )
