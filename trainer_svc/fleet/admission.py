"""Whether a replica can serve a run: found out before it gets a byte."""

from __future__ import annotations

from collections.abc import Iterator

from refit.v1 import adapter_pb2

from common.adapter import ExpertLayout, Kind, Layout, LoraConfig, Manifest
from common.errors import Incompatible, InvalidField
from common.model_dir import BaseModel
from common.wire import dtype_from_proto, kind_from_proto, layout_from_proto


def check_request(
    request: adapter_pb2.AdapterUpdateRequest,
    *,
    base: BaseModel,
    needed: Manifest,
    sends_base: bool = False,
) -> None:
    """Check a subscription against the run's base model and one of its versions.

    Args:
        sends_base: the base's own weights can be had from this trainer.

    Raises:
        InvalidField: a field is missing or malformed.
        Incompatible: with every reason why the replica cannot serve the run.
    """
    check_names(request)
    if reasons := list(_mismatches(request, base, needed, sends_base)):
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
    request: adapter_pb2.AdapterUpdateRequest,
    base: BaseModel,
    needed: Manifest,
    sends_base: bool,
) -> Iterator[str]:
    found, can = request.base_model, request.capabilities
    kinds = [kind_from_proto(kind, field="capabilities.kinds") for kind in can.kinds] or [Kind.LORA]
    if found.fingerprint != base.fingerprint and not (can.needs_base and not found.fingerprint):
        yield (
            f"base_model: the replica has {found.name!r} (fingerprint {found.fingerprint!r}), "
            f"the run trains {base.name!r} (fingerprint {base.fingerprint!r}); "
            "load the same model on both"
        )
    if needed.kind not in kinds:
        taken_kinds = ", ".join(kind.name for kind in kinds)
        yield (
            f"capabilities.kinds: the replica takes {taken_kinds}, the run publishes "
            f"{needed.kind.name}; set the trainer's merge to match, or restart the replica"
        )
    if needs_base_first(can, needed) and not (sends_base and Kind.BASE in kinds):
        yield (
            "capabilities.needs_base: the replica started without weights and cannot get the "
            "base's here; start it with the model's own (load_format)"
        )
    if needed.lora:
        yield from _lora_mismatches(can, needed.lora)
        yield from _layout_mismatches(can, needed)
    taken = {dtype_from_proto(d, field="capabilities.dtypes") for d in can.dtypes}
    if unknown := sorted({t.dtype.value for t in needed.tensors if t.dtype not in taken}):
        yield f"capabilities.dtypes: the replica does not take {', '.join(unknown)}"


def needs_base_first(can: adapter_pb2.ReplicaCapabilities, needed: Manifest) -> bool:
    """Whether the base must come first: a merged version brings every weight itself."""
    return can.needs_base and needed.kind is Kind.LORA


def _lora_mismatches(can: adapter_pb2.ReplicaCapabilities, lora: LoraConfig) -> Iterator[str]:
    if can.max_rank < lora.rank:
        yield (
            f"capabilities.max_rank: {can.max_rank} on the replica, the run's adapters have "
            f"rank {lora.rank}; raise max_lora_rank there"
        )
    if missing := sorted(set(lora.target_modules) - set(can.target_modules)):
        yield f"capabilities.target_modules: the replica cannot adapt {', '.join(missing)}"


def _layout_mismatches(can: adapter_pb2.ReplicaCapabilities, needed: Manifest) -> Iterator[str]:
    stated = [layout_from_proto(layout, field="capabilities.layouts") for layout in can.layouts]
    missing = {tensor.layout for tensor in needed.tensors}
    missing -= set(stated or ExpertLayout.PER_EXPERT.factors)
    if Layout.MAGNITUDE in missing:
        yield (
            "capabilities.layouts: the replica cannot serve DoRA adapters, which the run trains "
            '(lora.type = "dora"); set merge = "trainer" on the trainer, or train another type'
        )
    if packed := sorted(layout.value for layout in missing - {Layout.MAGNITUDE}):
        yield (
            f"capabilities.layouts: the replica does not take {', '.join(packed)}; "
            "set lora.expert_layout on the trainer to one that it takes"
        )
