"""One version's bytes, whole or still arriving, as senders and receivers share them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from common.adapter import AdapterRef, Canary, Manifest
from common.errors import Unavailable
from common.rules import Rules
from common.signal import Signal
from common.wire import ManifestMessage, manifest_to_proto


@dataclass(frozen=True, slots=True)
class Delta:
    """An encoded piece of a flat buffer that ends before byte `end`."""

    end: int
    data: bytes


@dataclass(slots=True, eq=False, weakref_slot=True)
class Content:
    """A manifest and its flat buffer, filled from the beginning and never written to again.

    content = Content(ref, manifest, buffer)            # still arriving
    content.advance(1 << 20)                            # so many bytes are there
    content.finish()                                    # verified: may be committed

    `Content.whole` makes one that has all of this behind it.
    """

    ref: AdapterRef
    manifest: Manifest
    buffer: memoryview
    canary: Canary | None = None
    rules: Rules = Rules()  # noqa: RUF009 - frozen
    arrived_bytes: int = 0
    finished: bool = False
    failure: str = ""
    delta_base: AdapterRef | None = None
    """What it arrived as a difference to."""

    deltas: dict[tuple[bytes, int], Delta] = field(default_factory=dict)
    """Deltas that came as such, by the digest of their base and their first byte."""

    _pages: list[ManifestMessage] = field(default_factory=list)
    _unmade_pages: Iterator[ManifestMessage] | None = None
    _changed: Signal = field(default_factory=Signal)

    @classmethod
    def whole(
        cls,
        ref: AdapterRef,
        manifest: Manifest,
        buffer: memoryview,
        *,
        canary: Canary | None = None,
        rules: Rules = Rules(),  # noqa: B008 - frozen
    ) -> Content:
        return cls(
            ref,
            manifest,
            buffer.toreadonly(),
            canary=canary,
            rules=rules,
            arrived_bytes=manifest.total_bytes,
            finished=True,
        )

    def messages(self) -> Iterator[ManifestMessage]:
        """The manifest as it is sent; each page is made once, when somebody comes to it."""
        if self._unmade_pages is None:
            first, others = manifest_to_proto(
                self.ref, self.manifest, canary=self.canary, rules=self.rules
            )
            self._unmade_pages = itertools.chain([first], others)
        number = 0
        while True:
            if number == len(self._pages):
                self._pages.extend(itertools.islice(self._unmade_pages, 1))
            if number == len(self._pages):
                return
            yield self._pages[number]
            number += 1

    def advance(self, arrived_bytes: int) -> None:
        """The first `arrived_bytes` bytes are there now."""
        self.arrived_bytes = arrived_bytes
        self._changed.notify()

    def finish(self) -> None:
        """Every byte is there and verified."""
        self.finished = True
        self._changed.notify()

    def fail(self, reason: str) -> None:
        """The rest will never come; whoever waits for it gets `Unavailable`."""
        self.failure = reason
        self._changed.notify()

    async def arrived_beyond(self, position: int, *, timeout_seconds: float) -> bool:
        """Whether byte `position` is there in time; raises `Unavailable` when it never will be."""
        return await self._reached(lambda: self.arrived_bytes > position, timeout_seconds)

    async def was_finished(self, *, timeout_seconds: float) -> bool:
        """Whether all is verified in time; raises `Unavailable` when it never will be."""
        return await self._reached(lambda: self.finished, timeout_seconds)

    async def _reached(self, reached: Callable[[], bool], timeout_seconds: float) -> bool:
        await self._changed.wait_until(
            lambda: reached() or bool(self.failure), timeout_seconds=timeout_seconds
        )
        if self.failure:
            raise Unavailable(f"{self.ref}: this relay gave it up ({self.failure}); ask another")
        return reached()
