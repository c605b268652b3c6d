"""What a replica's word on an update changes."""

from __future__ import annotations

import logging

from refit.v1 import adapter_pb2

from common.adapter import BASE_NAME, AdapterRef
from common.errors import CorruptUpdate, InvalidField
from common.wire import ref_from_proto
from trainer_svc.fleet.replica import Refusal, Replica
from trainer_svc.publisher import Publisher

log = logging.getLogger(__name__)

_MAX_REASON_CHARACTERS = 1024
_SHOWN_MISMATCHES = 3
_MAX_MISMATCH_CHARACTERS = 200


def take_report(
    request: adapter_pb2.ReportAdapterRequest, *, replica: Replica, publisher: Publisher
) -> None:
    """Take an update for committed or refused.

    Raises:
        InvalidField: a field is malformed, or the version was never published.
        CorruptUpdate: other bytes were committed than were published.
    """
    ref = ref_from_proto(request.ref)
    if request.outcome == adapter_pb2.OUTCOME_REFUSED:
        reason = request.reason[:_MAX_REASON_CHARACTERS] + _homeless(request)
        _refused(replica, Refusal(ref, request.stage, reason))
    elif request.outcome == adapter_pb2.OUTCOME_COMMITTED and ref.adapter == BASE_NAME:
        _check_base(ref, publisher)
        replica.refusals = {n: r for n, r in replica.refusals.items() if n != BASE_NAME}
        log.info("replica %s has the base's weights", replica.id)
    elif request.outcome == adapter_pb2.OUTCOME_COMMITTED:
        _check_committed(replica, ref, publisher)
        _committed(replica, request, publisher)
    else:
        raise InvalidField(f"outcome: {request.outcome}; say COMMITTED or REFUSED")


def _homeless(request: adapter_pb2.ReportAdapterRequest) -> str:
    """The tensors without a place that the reason does not name; the first few, and how many."""
    new = [found for found in request.mismatches if found.tensor not in request.reason]
    if not new:
        return ""
    shown = ", ".join(map(_mismatch, new[:_SHOWN_MISMATCHES]))
    more = len(new) - _SHOWN_MISMATCHES
    return f"; no place for {shown}" + (f" and {more} more" if more > 0 else "")


def _mismatch(found: adapter_pb2.TensorMismatch) -> str:
    names = {number: name for name, number in adapter_pb2.MismatchReason.items()}
    words = found.detail or names.get(found.reason, "for a reason unknown here")
    return f"{found.tensor} ({words})"[:_MAX_MISMATCH_CHARACTERS]


def _refused(replica: Replica, refusal: Refusal) -> None:
    others = {name: r for name, r in replica.refusals.items() if name != refusal.ref.adapter}
    replica.refusals = {**others, refusal.ref.adapter: refusal}
    log.error("replica %s refused %s: %s", replica.id, refusal.ref, refusal.reason)


def _check_committed(replica: Replica, ref: AdapterRef, publisher: Publisher) -> None:
    published = {(kept.adapter, kept.version): kept for kept in publisher.refs()}
    newest = max((v for name, v in published if name == ref.adapter), default=0)
    expected = published.get((ref.adapter, ref.version))
    if ref.run_id != publisher.run_id or (expected is None and ref.version > newest):
        raise InvalidField(f"ref: {ref} was never published; report what this trainer sent")
    if expected is not None and expected != ref:
        reason = f"committed {ref}, published was {expected}"
        # It may have held the right ones before.
        replica.committed = {key: r for key, r in replica.committed.items() if r != expected}
        _refused(replica, Refusal(expected, adapter_pb2.UPDATE_STAGE_LOAD, reason))
        raise CorruptUpdate(reason)


def _check_base(ref: AdapterRef, publisher: Publisher) -> None:
    sent = publisher.base.ref if publisher.base else None
    if sent is None or (ref.run_id, ref.version) != (sent.run_id, sent.version):
        raise InvalidField(f"ref: {ref} was never sent; report what this trainer sent")
    if ref.digest != sent.digest:
        raise CorruptUpdate(f"committed {ref}, sent was {sent}")


def _committed(
    replica: Replica, request: adapter_pb2.ReportAdapterRequest, publisher: Publisher
) -> None:
    replica.line.failures_in_a_row = 0
    replica.timings, replica.wire_bytes = request.timings, request.wire_bytes
    if request.HasField("canary_difference"):
        replica.canary_difference = request.canary_difference
    content = publisher.store.find(ref_from_proto(request.ref))
    if content and request.wire_bytes >= content.manifest.total_bytes:
        replica.subscription.measured(
            wire_bytes=request.wire_bytes, wire_seconds=request.timings.wire_seconds
        )
