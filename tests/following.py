"""One update, and a subscriber that follows the trainer who sends it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from refit.v1 import adapter_pb2

from common.stream.content import Content
from common.stream.frames import Event
from rollout_svc.updates.subscriber import Subscriber
from tests.adapters import make_adapter, make_ref
from tests.fake_trainer import FakeTrainer, update_events

MANIFEST, BUFFER = make_adapter()
REF = make_ref(MANIFEST)
WHOLE = Content.whole(REF, MANIFEST, BUFFER)
UPDATE = list(update_events(REF, MANIFEST, BUFFER, chunk_bytes=50))
HEARTBEAT = Event(heartbeat=adapter_pb2.Heartbeat(interval_seconds=0.02))
Follow = Callable[[FakeTrainer], AbstractAsyncContextManager[Subscriber]]
