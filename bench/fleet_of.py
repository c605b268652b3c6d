"""A trainer in this process and replicas as processes, their engines left out."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from bench.shapes import BASE_FINGERPRINT
from common.adapter import Manifest
from common.model_dir import BaseModel
from trainer_svc.config import ServerSettings
from trainer_svc.control import RunControl
from trainer_svc.fleet import Replica
from trainer_svc.node import Node, serve_node

_DEADLINE_SECONDS = 120.0


@contextlib.asynccontextmanager
async def trainer(settings: ServerSettings) -> AsyncIterator[Node]:
    base = BaseModel("bench", BASE_FINGERPRINT)
    control = RunControl("bench", steps_total=0)
    async with serve_node(settings, base=base, control=control, engine="") as node:
        yield node


@contextlib.asynccontextmanager
async def replicas(node: Node, count: int, *, staging: Path) -> AsyncIterator[None]:
    """`count` replica processes that follow the trainer, until the block ends.

    Not by the event loop, which forks: gRPC's threads do not survive that.
    """
    command = [sys.executable, "-m", "bench.replica", node.server.address, str(staging)]
    start = partial(subprocess.Popen, command, stdout=subprocess.DEVNULL)
    processes = [await asyncio.to_thread(start) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            await asyncio.to_thread(process.wait, _DEADLINE_SECONDS)


class Publications:
    """Publishes version after version and waits until the fleet has each."""

    def __init__(self, node: Node, *, count: int) -> None:
        self._node = node
        self._count = count
        self._version = 0

    async def publish(self, manifest: Manifest, buffer: memoryview) -> list[Replica]:
        self._version += 1
        self._node.fleet.require(manifest)
        self._node.publisher.publish("default", manifest, buffer, version=self._version)
        return await self._node.fleet.wait_for(
            "default",
            self._version,
            replicas=self._count,
            timeout_seconds=_DEADLINE_SECONDS,
            straggler_seconds=0,
        )
