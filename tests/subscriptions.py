"""A fleet, and what its replicas ask and tell."""

from __future__ import annotations

from dataclasses import dataclass

from refit.v1 import adapter_pb2, tensor_pb2, version_pb2

from common.adapter import AdapterRef
from common.wire import ref_to_proto
from tests.adapters import make_adapter
from trainer_svc.fleet import Fleet
from trainer_svc.publisher import Publisher


@dataclass(frozen=True, slots=True)
class Run:
    """A fleet and its publisher."""

    fleet: Fleet
    publisher: Publisher

    def publish(self, version: int, *, adapter: str = "default") -> AdapterRef:
        """A version of random bytes."""
        manifest, buffer = make_adapter(seed=version)
        self.fleet.require(manifest)
        return self.publisher.publish(adapter, manifest, buffer, version=version)


def subscription_request(
    replica_id: str = "r1", *, held: list[AdapterRef] | None = None, relay: bool = False
) -> adapter_pb2.AdapterUpdateRequest:
    """Of a replica with base "base" that can take what `make_adapter` makes."""
    return adapter_pb2.AdapterUpdateRequest(
        replica_id=replica_id,
        advertised_address=f"{replica_id}:1",
        base_model=version_pb2.BaseModel(name="m", fingerprint="base"),
        capabilities=adapter_pb2.ReplicaCapabilities(
            max_rank=8,
            max_loras=4,
            target_modules=["q_proj", "k_proj"],
            dtypes=[tensor_pb2.DTYPE_FLOAT32],
            encodings=[adapter_pb2.ENCODING_HELD, adapter_pb2.ENCODING_DELTA_ZSTD],
            relay=relay,
        ),
        held=map(ref_to_proto, held or []),
    )


def committed(replica_id: str, *held: AdapterRef) -> adapter_pb2.ReportAdapterRequest:
    """The last of `held` was committed."""
    return adapter_pb2.ReportAdapterRequest(
        replica_id=replica_id,
        ref=ref_to_proto(held[-1]),
        outcome=adapter_pb2.OUTCOME_COMMITTED,
        held=map(ref_to_proto, held),
    )


def refused(
    replica_id: str,
    ref: AdapterRef,
    *held: AdapterRef,
    stage: adapter_pb2.UpdateStage = adapter_pb2.UPDATE_STAGE_LOAD,
) -> adapter_pb2.ReportAdapterRequest:
    """`ref` was refused for want of room."""
    return adapter_pb2.ReportAdapterRequest(
        replica_id=replica_id,
        ref=ref_to_proto(ref),
        outcome=adapter_pb2.OUTCOME_REFUSED,
        reason="no room",
        stage=stage,
        held=map(ref_to_proto, held),
    )
