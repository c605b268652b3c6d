"""What became of updates, told to the trainer, the metrics and the log."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from refit.v1 import adapter_pb2, version_pb2

from common.errors import RefitError
from common.wire import ref_to_proto
from rollout_svc.engine import Mismatch
from rollout_svc.metrics import Metrics
from rollout_svc.versions.binding import Unbound
from rollout_svc.versions.registry import AdapterRegistry

log = logging.getLogger(__name__)

Report = Callable[[adapter_pb2.ReportAdapterRequest], Awaitable[None]]

_TOLD_MISMATCHES = 100


@dataclass(slots=True)
class Outcomes:
    """Of one trainer's updates; every report says what is held of them then."""

    source: str
    registry: AdapterRegistry
    metrics: Metrics
    report: Report

    async def committed(self, report: adapter_pb2.ReportAdapterRequest) -> None:
        self.metrics.updates.labels("committed").inc()
        self.metrics.adapters_live.set(len(self.registry.listing()))
        report.outcome = adapter_pb2.OUTCOME_COMMITTED
        await self._tell(report)

    async def refused(
        self, ref: version_pb2.AdapterRef, error: RefitError, stage: adapter_pb2.UpdateStage
    ) -> None:
        self.metrics.refused(error, stage)
        log.error("refused %s@%d: %s", ref.adapter, ref.version, error)
        mismatches = error.mismatches if isinstance(error, Unbound) else ()
        await self._tell(
            adapter_pb2.ReportAdapterRequest(
                ref=ref,
                outcome=adapter_pb2.OUTCOME_REFUSED,
                reason=str(error),
                stage=stage,
                mismatches=map(_mismatch_to_proto, mismatches[:_TOLD_MISMATCHES]),
            )
        )

    async def _tell(self, report: adapter_pb2.ReportAdapterRequest) -> None:
        held = self.registry.listing(source=self.source)
        report.held.extend(map(ref_to_proto, held))
        await self.report(report)


def _mismatch_to_proto(mismatch: Mismatch) -> adapter_pb2.TensorMismatch:
    return adapter_pb2.TensorMismatch(
        tensor=mismatch.tensor,
        reason=f"MISMATCH_REASON_{mismatch.reason.name}",
        detail=mismatch.detail,
    )
