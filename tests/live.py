"""Versions that are committed without having been received."""

from __future__ import annotations

from pathlib import Path

from common.adapter import AdapterRef
from common.model_dir import BaseModel
from common.stream.content import Content
from rollout_svc.adapters import AdapterRegistry
from rollout_svc.weights import Committed
from tests.adapters import make_adapter

BASE = BaseModel("tiny", "base")
"""What `make_adapter`'s belong to."""

_MANIFEST, _BUFFER = make_adapter()


def content_of(ref: AdapterRef) -> Content:
    """One whose bytes nobody looks at."""
    return Content.whole(ref, _MANIFEST, _BUFFER)


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
