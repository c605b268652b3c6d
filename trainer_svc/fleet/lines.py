"""The ways to the replicas, and the work on them: both outlive a subscription that breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from refit.v1 import rollout_pb2_grpc

_KEEP_SECONDS = 60.0
"""How long a replica that left may come back to its line, and its generations may run on."""


@dataclass(slots=True, eq=False)
class Line:
    """A replica's channel, and how it does there."""

    address: str
    channel: grpc.aio.Channel
    stub: rollout_pb2_grpc.RolloutServiceStub
    outstanding: int = 0
    failures_in_a_row: int = 0
    draining: str = ""


class Lines:
    """Opens lines, and keeps those of replicas that left for a minute.

    Args:
        open_channel: makes the channel to a replica's address.
    """

    def __init__(self, open_channel: Callable[[str], grpc.aio.Channel]) -> None:
        self._open_channel = open_channel
        self._kept: dict[str, tuple[Line, asyncio.TimerHandle]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def take(self, replica_id: str, address: str) -> Line:
        """The line that is kept for this replica at this address, or a new one."""
        if replica_id in self._kept and self._kept[replica_id][0].address == address:
            line, timer = self._kept.pop(replica_id)
            timer.cancel()
            return line
        channel = self._open_channel(address)
        return Line(address, channel, rollout_pb2_grpc.RolloutServiceStub(channel))

    def keep(self, replica_id: str, line: Line) -> None:
        """The replica has left; its line is closed unless it comes back in time."""
        self._drop(replica_id)
        loop = asyncio.get_running_loop()
        self._kept[replica_id] = (line, loop.call_later(_KEEP_SECONDS, self._drop, replica_id))

    def _drop(self, replica_id: str) -> None:
        if replica_id not in self._kept:
            return
        line, timer = self._kept.pop(replica_id)
        timer.cancel()
        task = asyncio.ensure_future(line.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Cut those that are kept; whatever runs there is cancelled."""
        for replica_id in list(self._kept):
            self._drop(replica_id)
        await asyncio.gather(*self._closing, return_exceptions=True)
