"""Whole updates, and an applier that is fed them."""

from __future__ import annotations

from refit.v1 import adapter_pb2

from common.adapter import AdapterRef, Canary
from common.stream.frames import Event
from common.wire import ref_to_proto
from rollout_svc.updates.applier import UpdateApplier
from tests.adapters import make_adapter, make_ref
from tests.fake_trainer import update_events

REFUSED = adapter_pb2.OUTCOME_REFUSED


def update(
    version: int = 1, *, chunk_bytes: int = 50, seed: int = 0, canary: Canary | None = None
) -> tuple[AdapterRef, list[Event]]:
    """Manifest, four chunks of at most 50 bytes, commit."""
    manifest, buffer = make_adapter(seed=seed)
    ref = make_ref(manifest, version=version)
    return ref, list(update_events(ref, manifest, buffer, chunk_bytes=chunk_bytes, canary=canary))


async def apply_all(applier: UpdateApplier, events: list[Event]) -> None:
    for event in events:
        await applier.apply(event)


def retire(ref: AdapterRef) -> Event:
    return Event(retire=adapter_pb2.AdapterRetire(ref=ref_to_proto(ref)))
