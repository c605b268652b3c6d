"""Whether a replica can serve a run: found out before it gets a byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from refit.v1 import adapter_pb2, tensor_pb2

from common.adapter import ExpertLayout, Kind, Layout, LoraConfig, Manifest
from common.errors import Incompatible, InvalidField
from common.model_dir import BaseModel
from common.rules import Merge, Rules, Swap, merge_from_proto, swap_from_proto
from common.wire import dtype_from_proto, kind_from_proto, layout_from_proto

Capabilities = adapter_pb2.ReplicaCapabilities


@dataclass(frozen=True, slots=True)
class Needed:
    """What a run asks of a replica: a version with its rules, and the names of all adapters."""

    manifest: Manifest
    rules: Rules = Rules()  # noqa: RUF009 - frozen
    adapters: frozenset[str] = frozenset()


def check_request(
    request: adapter_pb2.AdapterUpdateRequest,
    *,
    base: BaseModel,
    needed: Needed,
    sends_base: bool = False,
) -> None:
    """Check a subscription against the run's base model and what it publishes.

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
    needed: Needed,
    sends_base: bool,
) -> Iterator[str]:
    found, can, manifest = request.base_model, request.capabilities, needed.manifest
    kinds = [kind_from_proto(kind, field="capabilities.kinds") for kind in can.kinds] or [Kind.LORA]
    if found.fingerprint != base.fingerprint and not (can.needs_base and not found.fingerprint):
        yield (
            f"base_model: the replica has {found.name!r} (fingerprint {found.fingerprint!r}), "
            f"the run trains {base.name!r} (fingerprint {base.fingerprint!r}); "
            "load the same model on both"
        )
    if manifest.kind not in kinds:
        taken_kinds = ", ".join(kind.name for kind in kinds)
        yield (
            f"capabilities.kinds: the replica takes {taken_kinds}, the run publishes "
            f"{manifest.kind.name}; set the trainer's merge to match, or restart the replica"
        )
    if needs_base_first(can, manifest) and not (sends_base and Kind.BASE in kinds):
        yield (
            "capabilities.needs_base: the replica started without weights and cannot get the "
            "base's here; start it with the model's own (load_format)"
        )
    yield from _swap_mismatches(can, needed.rules)
    if manifest.lora:
        wanted = needed.adapters & set(request.adapters or needed.adapters)
        yield from _merge_mismatches(can, manifest, manifest.lora, needed.rules, sorted(wanted))
    taken = {dtype_from_proto(d, field="capabilities.dtypes") for d in can.dtypes}
    if unknown := sorted({t.dtype.value for t in manifest.tensors if t.dtype not in taken}):
        yield f"capabilities.dtypes: the replica does not take {', '.join(unknown)}"


def needs_base_first(can: Capabilities, needed: Manifest) -> bool:
    """Whether the base must come first: a merged version brings every weight itself."""
    return can.needs_base and needed.kind is Kind.LORA


def _swap_mismatches(can: Capabilities, rules: Rules) -> Iterator[str]:
    field = "capabilities.swap_rules"
    known = {swap_from_proto(rule, field=field) for rule in can.swap_rules} or {Swap.FINISH}
    if rules.swap and rules.swap not in known:
        words = ", ".join(sorted(swap.value for swap in known if swap))
        yield (
            f'{field}: the run asks for swap = "{rules.swap.value}", the replica knows {words}; '
            "set the trainer's swap to match"
        )


def _merge_mismatches(
    can: Capabilities, manifest: Manifest, lora: LoraConfig, rules: Rules, adapters: list[str]
) -> Iterator[str]:
    """Of the rule that will apply: the run's, or else the replica's own."""
    rule = rules.merge or merge_from_proto(can.merge, field="capabilities.merge") or Merge.NEVER
    layouts = {tensor.layout for tensor in manifest.tensors}
    if rule is Merge.ROLLOUT:
        yield from _merging_mismatches(can, lora, layouts)
        if len(adapters) > 1:
            yield (
                "capabilities.merge: the replica sums adapters into its weights and serves one, "
                f"the run publishes {', '.join(adapters)}; set the trainer's merge to never"
            )
    elif not can.max_loras:
        yield (
            "capabilities.max_loras: 0, and the run's adapters are to be served from LoRA slots; "
            'set max_loras on the replica, or the trainer\'s merge to "rollout"'
        )
    else:
        yield from _slot_mismatches(can, lora, layouts)


def _merging_mismatches(can: Capabilities, lora: LoraConfig, layouts: set[Layout]) -> Iterator[str]:
    if not can.HasField("merging"):
        yield (
            "capabilities.merging: the replica cannot sum adapters into its weights, which is "
            "what they are published for; set the trainer's merge to never"
        )
        return
    field = "capabilities.merging"
    yield from _target_mismatches(f"{field}.target_modules", can.merging.target_modules, lora)
    yield from _layout_mismatches(f"{field}.layouts", can.merging.layouts, layouts)


def _slot_mismatches(can: Capabilities, lora: LoraConfig, layouts: set[Layout]) -> Iterator[str]:
    if can.max_rank < lora.rank:
        yield (
            f"capabilities.max_rank: {can.max_rank} on the replica, the run's adapters have "
            f"rank {lora.rank}; raise max_lora_rank there"
        )
    yield from _target_mismatches("capabilities.target_modules", can.target_modules, lora)
    yield from _layout_mismatches("capabilities.layouts", can.layouts, layouts)


def _target_mismatches(field: str, taken: Iterable[str], lora: LoraConfig) -> Iterator[str]:
    if missing := sorted(set(lora.target_modules) - set(taken)):
        yield f"{field}: the replica cannot adapt {', '.join(missing)}"


def _layout_mismatches(
    field: str, stated: Iterable[tensor_pb2.TensorLayout], needed: set[Layout]
) -> Iterator[str]:
    taken = {layout_from_proto(layout, field=field) for layout in stated}
    missing = needed - (taken or set(ExpertLayout.PER_EXPERT.factors))
    if Layout.MAGNITUDE in missing:
        yield (
            f"{field}: the replica cannot serve DoRA adapters so, which the run trains "
            '(lora.type = "dora"); set the trainer\'s merge to rollout or trainer, or train '
            "another type"
        )
    if packed := sorted(layout.value for layout in missing - {Layout.MAGNITUDE}):
        yield (
            f"{field}: the replica does not take {', '.join(packed)}; "
            "set lora.expert_layout on the trainer to one that it takes"
        )
