"""`refit publish`: adapters from a directory to a fleet, trained by whoever writes them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import uvloop
from watchfiles import awatch

from common.errors import ConfigError, RefitError
from common.model_dir import base_model
from common.peft_dir import CONFIG_FILE, WEIGHTS_FILE
from common.rules import Merge, Rules
from common.tasks import cancel, first_of, stop_requested
from trainer_svc.config import PublishConfig, ServerSettings
from trainer_svc.control import RunControl
from trainer_svc.node import Node, serve_node
from trainer_svc.sources import AdapterSource, PeftDirSource

log = logging.getLogger(__name__)


def main(peft_dir: Path, *, model: Path, adapter: str, config: PublishConfig, watch: bool) -> None:
    """Serve until told to stop. Raises `RefitError` for whatever the user can mend."""
    uvloop.run(_serve(peft_dir, model=model, adapter=adapter, config=config, watch=watch))


async def _serve(
    peft_dir: Path, *, model: Path, adapter: str, config: PublishConfig, watch: bool
) -> None:
    stop = stop_requested()
    config.server.security.check()  # so that a mistake shows before the model is read
    if not peft_dir.is_dir():
        raise ConfigError(f"PEFT_DIR: {peft_dir} is no directory; give a PEFT adapter directory")
    async with serve_without_run(model, config.server) as node:
        feed = DirectoryFeed(peft_dir, node, adapter=adapter, rules=config.rules)
        if not watch:
            await feed.publish(peft_dir)
            await stop.wait()
            return
        task = asyncio.ensure_future(feed.watch())
        try:
            await first_of(stop, task)
        finally:
            await cancel(task)


@contextlib.asynccontextmanager
async def serve_without_run(model: Path, server: ServerSettings) -> AsyncIterator[Node]:
    """A node that others feed: a new run id, and nothing that trains here.

    Raises:
        ConfigError: the model cannot be read, or the port not be bound.
    """
    control = RunControl(uuid.uuid4().hex[:12], steps_total=0)
    async with serve_node(server, base=base_model(model), control=control, engine="") as node:
        yield node


class DirectoryFeed:
    """Publishes PEFT directories as the versions 1, 2, … of one adapter."""

    def __init__(
        self,
        root: Path,
        node: Node,
        *,
        adapter: str,
        rules: Rules = Rules(),  # noqa: B008 - frozen
        rescan_seconds: float = 5.0,
    ) -> None:
        self._root = root
        self._node = node
        self._adapter = adapter
        self._rules = rules
        self._rescan_ms = round(rescan_seconds * 1000)
        self._seen: _Written | None = None
        self._version = 0
        self._last_digest = b""

    async def publish(self, peft_dir: Path) -> None:
        """Publish a directory's content, unless the current version is just that.

        Raises:
            ConfigError: it is no adapter that can be served.
        """
        source: AdapterSource = PeftDirSource(
            peft_dir,
            base_fingerprint=self._node.base.fingerprint,
            dora=self._rules.merge is not Merge.NEVER,
        )
        adapter = await source.read()
        if adapter.manifest.digest() == self._last_digest:
            return
        self._version += 1
        self._last_digest = adapter.manifest.digest()
        self._node.fleet.require(adapter.manifest, rules=self._rules)
        ref = self._node.publisher.publish(
            self._adapter,
            adapter.manifest,
            adapter.buffer,
            version=self._version,
            rules=self._rules,
        )
        await self._node.ready()
        log.info("published %s from %s", ref, peft_dir)

    async def watch(self) -> None:
        """Publish the newest adapter now, and each that is written to the root or right below.

        The rescans find what was written before the watch on its directory was in place.
        """
        await self._publish_newest(changed=True)
        changes = awatch(self._root, yield_on_timeout=True, rust_timeout=self._rescan_ms)
        async for change in changes:
            await self._publish_newest(changed=bool(change))

    async def _publish_newest(self, *, changed: bool) -> None:
        try:
            newest = max(map(_written, _adapters(self._root)), default=None)
            if newest is None or (newest == self._seen and not changed):
                return
            self._seen = newest
            await self.publish(newest.path)
        except (RefitError, OSError) as error:
            # It may be half written, or just removed: its next change brings it up again.
            log.warning("not published: %s", error)


class _Written(NamedTuple):
    """When a directory was last written; compares by time."""

    newest_ns: int
    size_bytes: int
    path: Path


def _adapters(root: Path) -> list[Path]:
    # A name with a dot is somebody's unfinished work.
    below = [c for c in root.iterdir() if c.is_dir() and not c.name.startswith(".")]
    candidates = [root, *below]
    return [c for c in candidates if (c / CONFIG_FILE).is_file() and (c / WEIGHTS_FILE).is_file()]


def _written(peft_dir: Path) -> _Written:
    found = [(peft_dir / name).stat() for name in (CONFIG_FILE, WEIGHTS_FILE)]
    return _Written(max(s.st_mtime_ns for s in found), sum(s.st_size for s in found), peft_dir)
