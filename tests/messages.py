"""The stream's messages as protobuf reads them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from common.stream.frames import Event, Message, serialize


def as_event(message: Message) -> Event:
    """What arrives of a message where protobuf reads it."""
    return Event.FromString(serialize(message))


async def as_events(messages: AsyncGenerator[Message]) -> AsyncGenerator[Event]:
    async with aclosing(messages):
        async for message in messages:
            yield as_event(message)
