"""Versions that are committed without having been received."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from common.adapter import AdapterRef
from common.model_dir import BaseModel
from common.stream.content import Content
from rollout_svc.versions.commits import Committed
from rollout_svc.versions.live import LiveAdapter
from rollout_svc.versions.pristine import PristineBase
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.versions.selector import Selector
from tests.adapters import make_adapter

BASE = BaseModel("tiny", "base")
"""What `make_adapter`'s belong to."""

PRISTINE = PristineBase(Path("tiny"))
"""Its weights; an engine without a model reads none."""

_MANIFEST, _BUFFER = make_adapter()


def content_of(ref: AdapterRef) -> Content:
    """One whose bytes nobody looks at."""
    return Content.whole(ref, _MANIFEST, _BUFFER)


@asynccontextmanager
async def admit(
    registry: AdapterRegistry, selector: Selector, *, wait_seconds: float
) -> AsyncIterator[LiveAdapter | None]:
    """A request of its own; gives the version it was let in to."""
    async with registry.admit(
        selector, request_id=uuid.uuid4().hex, wait_seconds=wait_seconds
    ) as admitted:
        yield admitted.live


class Commits:
    """Commits versions from directories under `parent`, each of its own.

    await Commits(registry, parent)(ref)
    """

    def __init__(self, registry: AdapterRegistry, parent: Path) -> None:
        self._registry, self._parent = registry, parent
        self.paths: list[Path] = []

    async def __call__(self, ref: AdapterRef, *, source: str = "trainer") -> Committed:
        path = self._parent / str(len(self.paths))
        path.mkdir()
        self.paths.append(path)
        return await self._registry.commit(content_of(ref), path, source=source)
