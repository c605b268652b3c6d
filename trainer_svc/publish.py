"""`refit publish`: adapters from a directory to a fleet, trained by whoever writes them."""

from __future__ import annotations

import asyncio
import logging
import uuid
from pathlib import Path

import uvloop
from watchfiles import awatch

from common.errors import ConfigError, RefitError
from common.model_dir import base_model
from common.peft_dir import CONFIG_FILE, WEIGHTS_FILE
from common.tasks import cancel, first_of, stop_requested
from trainer_svc.config import ServerSettings
from trainer_svc.control import RunControl
from trainer_svc.node import Node, serve_node
from trainer_svc.sources import AdapterSource, PeftDirSource

log = logging.getLogger(__name__)


def main(peft_dir: Path, *, model: Path, adapter: str, server: ServerSettings, watch: bool) -> None:
    """Serve until told to stop. Raises `RefitError` for whatever the user can mend."""
    uvloop.run(_serve(peft_dir, model=model, adapter=adapter, server=server, watch=watch))


async def _serve(
    peft_dir: Path, *, model: Path, adapter: str, server: ServerSettings, watch: bool
) -> None:
    stop = stop_requested()
    base = base_model(model)
    if not peft_dir.is_dir():
        raise ConfigError(f"PEFT_DIR: {peft_dir} is no directory; give a PEFT adapter directory")
    control = RunControl(uuid.uuid4().hex[:12], steps_total=0)
    async with serve_node(server, base=base, control=control, engine="") as node:
        feed = DirectoryFeed(peft_dir, node, adapter=adapter)
        if not watch:
            await feed.publish(peft_dir)
            await stop.wait()
            return
        task = asyncio.ensure_future(feed.watch())
        try:
            await first_of(stop, task)
        finally:
            await cancel(task)


class DirectoryFeed:
    """Publishes PEFT directories as the versions 1, 2, … of one adapter."""

    def __init__(self, root: Path, node: Node, *, adapter: str) -> None:
        self._root = root
        self._node = node
        self._adapter = adapter
        self._version = 0
        self._last_digest = b""

    async def publish(self, peft_dir: Path) -> None:
        """Publish a directory's content, unless the current version is just that.

        Raises:
            ConfigError: it is no adapter that can be served.
        """
        source: AdapterSource = PeftDirSource(
            peft_dir, base_fingerprint=self._node.base.fingerprint
        )
        adapter = await source.read()
        if adapter.manifest.digest() == self._last_digest:
            return
        self._version += 1
        self._last_digest = adapter.manifest.digest()
        self._node.fleet.require(adapter.manifest)
        ref = self._node.publisher.publish(
            self._adapter, adapter.manifest, adapter.buffer, version=self._version
        )
        await self._node.ready()
        log.info("published %s from %s", ref, peft_dir)

    async def watch(self) -> None:
        """Publish the newest adapter now, and each that is written to the root or right below."""
        await self._publish_newest()
        async for _ in awatch(self._root):
            await self._publish_newest()

    async def _publish_newest(self) -> None:
        newest = max(_adapters(self._root), key=_written_ns, default=None)
        if newest is None:
            return
        try:
            await self.publish(newest)
        except RefitError as error:
            # It may be half written: its next change brings it up again.
            log.warning("not published: %s", error)


def _adapters(root: Path) -> list[Path]:
    candidates = [root, *(child for child in root.iterdir() if child.is_dir())]
    return [c for c in candidates if (c / CONFIG_FILE).is_file() and (c / WEIGHTS_FILE).is_file()]


def _written_ns(peft_dir: Path) -> int:
    return max((peft_dir / name).stat().st_mtime_ns for name in (CONFIG_FILE, WEIGHTS_FILE))
