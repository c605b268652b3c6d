"""A publisher's subscriptions, read by hand."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from common.stream.frames import Event
from common.stream.sender import Pace
from tests.messages import as_events
from trainer_svc.publisher import Publisher
from trainer_svc.subscription import Subscription

PACE = Pace(heartbeat_seconds=0.02, lease_seconds=0.5)


async def subscribed(
    publisher: Publisher, subscription: Subscription | None = None
) -> AsyncGenerator[Event]:
    """A subscription past its first heartbeat."""
    events = as_events(publisher.subscribe(subscription or Subscription()))
    first = (await anext(events)).heartbeat
    assert (first.interval_seconds, first.lease_seconds) == (0.02, 0.5)
    return events


def kind(event: Event) -> str:
    return event.WhichOneof("event") or ""
