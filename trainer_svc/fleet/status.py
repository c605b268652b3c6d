"""The fleet as `GetStatus` and Prometheus show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from refit.v1 import trainer_pb2

from common.wire import ref_to_proto
from trainer_svc.fleet.fleet import Fleet
from trainer_svc.fleet.replica import Replica
from trainer_svc.publisher import Publisher

_PREFIX = "REPLICA_STATE_"


def fleet_status(fleet: Fleet) -> Iterator[trainer_pb2.ReplicaStatus]:
    """Those that are here, then those that were lost."""
    for replica in fleet.replicas:
        yield _status(fleet, replica)
    for lost in fleet.members.lost:
        yield trainer_pb2.ReplicaStatus(
            replica_id=lost.id,
            address=lost.address,
            state=trainer_pb2.REPLICA_STATE_LOST,
            reason=lost.reason,
        )


def _status(fleet: Fleet, replica: Replica) -> trainer_pb2.ReplicaStatus:
    state, reason = fleet.state(replica)
    refusal, parent = replica.refusal, replica.subscription.parent
    return trainer_pb2.ReplicaStatus(
        replica_id=replica.id,
        address=replica.address,
        adapters=map(ref_to_proto, replica.committed.values()),
        outstanding=replica.outstanding,
        refusal=refusal.reason if refusal else "",
        refusal_stage=refusal.stage if refusal else None,
        state=state,
        reason=reason,
        parent=parent.replica_id if parent else "",
        canary_difference=replica.canary_difference,
        wire_bytes=replica.wire_bytes,
    )


class FleetCollector(Collector):
    """`refit_trainer_replicas{state=...}`, every state named, prompts in flight, and versions."""

    def __init__(self, fleet: Fleet, publisher: Publisher) -> None:
        self._fleet = fleet
        self._publisher = publisher

    def collect(self) -> Iterator[GaugeMetricFamily]:
        statuses = list(fleet_status(self._fleet))
        count: Counter[int] = Counter(status.state for status in statuses)
        replicas = GaugeMetricFamily(
            "refit_trainer_replicas", "Replicas by state.", labels=["state"]
        )
        for name, state in trainer_pb2.ReplicaState.items():
            if state != trainer_pb2.REPLICA_STATE_UNSPECIFIED:
                replicas.add_metric([name.removeprefix(_PREFIX).lower()], count[state])
        yield replicas
        yield GaugeMetricFamily(
            "refit_trainer_prompts_outstanding",
            "Prompts sent to replicas and not answered yet.",
            value=sum(status.outstanding for status in statuses),
        )
        yield from self._versions()

    def _versions(self) -> Iterator[GaugeMetricFamily]:
        """Of each adapter, the newest one, and how far the slowest replica is behind it."""
        newest = _by_adapter("adapter_version", "Newest version published.")
        behind = _by_adapter("replica_versions_behind", "Versions the slowest replica lacks.")
        replicas = self._fleet.replicas
        for adapter, version in {r.adapter: r.version for r in self._publisher.refs()}.items():
            newest.add_metric([adapter], version)
            wanting = [r for r in replicas if r.subscription.wants(adapter)]
            gaps = [version - replica.newest(adapter) for replica in wanting]
            behind.add_metric([adapter], max(gaps, default=0))
        yield from (newest, behind)


def _by_adapter(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"refit_trainer_{name}", text, labels=["adapter"])
