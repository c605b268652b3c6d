"""Whether a replica can serve a run: found out before it gets a byte."""

from __future__ import annotations

from collections.abc import Iterator

from refit.v1 import adapter_pb2

from common.adapter import Manifest
from common.errors import Incompatible, InvalidField
from common.model_dir import BaseModel
from common.wire import dtype_from_proto


def check_request(
    request: adapter_pb2.AdapterUpdateRequest, *, base: BaseModel, needed: Manifest
) -> None:
    """Check a subscription against the run's base model and one of its adapters.

    Raises:
        InvalidField: a field is missing or malformed.
        Incompatible: with every reason why the replica cannot serve the run.
    """
    check_names(request)
    if reasons := list(_mismatches(request, base, needed)):
        raise Incompatible("; ".join(reasons))


def check_names(request: adapter_pb2.AdapterUpdateRequest) -> None:
    """Raises `InvalidField` where the replica does not say who it is, or what it has."""
    if not request.replica_id:
        raise InvalidField("replica_id: empty; give an id that is new with every start")
    host, _, port = request.advertised_address.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidField(
            f"advertised_address: {request.advertised_address!r}; give host:port as the "
            "trainer can reach it"
        )
    if request.partial.received_bytes < 0:
        raise InvalidField(f"partial.received_bytes: {request.partial.received_bytes}; at least 0")


def _mismatches(
    request: adapter_pb2.AdapterUpdateRequest, base: BaseModel, needed: Manifest
) -> Iterator[str]:
    found, can = request.base_model, request.capabilities
    if found.fingerprint != base.fingerprint:
        yield (
            f"base_model: the replica has {found.name!r} (fingerprint {found.fingerprint!r}), "
            f"the run trains {base.name!r} (fingerprint {base.fingerprint!r}); "
            "load the same model on both"
        )
    if can.max_rank < needed.lora.rank:
        yield (
            f"capabilities.max_rank: {can.max_rank} on the replica, the run's adapters have "
            f"rank {needed.lora.rank}; raise max_lora_rank there"
        )
    if missing := sorted(set(needed.lora.target_modules) - set(can.target_modules)):
        yield f"capabilities.target_modules: the replica cannot adapt {', '.join(missing)}"
    taken = {dtype_from_proto(d, field="capabilities.dtypes") for d in can.dtypes}
    if unknown := sorted({t.dtype.value for t in needed.tensors if t.dtype not in taken}):
        yield f"capabilities.dtypes: the replica does not take {', '.join(unknown)}"
