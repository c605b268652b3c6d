"""The list of what is loaded or staged, and what new requests find in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.adapter import AdapterRef
from common.errors import AlreadyExists
from common.stream.content import Content
from rollout_svc.versions.live import LiveAdapter
from rollout_svc.versions.retention import Retention, current
from rollout_svc.versions.selector import Selector


@dataclass(slots=True)
class LiveVersions:
    """Nothing here awaits: a cancellation comes before a change or after it.

    `all` has every version that is loaded or staged, oldest commit first, the retired among them
    until their last request ends.
    """

    retention: Retention
    all: list[LiveAdapter] = field(default_factory=list)

    def current(self) -> list[LiveAdapter]:
        """Those that a new request may find."""
        return current(self.all)

    def refs(self, *, source: str | None = None) -> list[AdapterRef]:
        """The current ones of one trainer, or of all."""
        return [live.ref for live in self.current() if source in (None, live.source)]

    def contents(self) -> list[Content]:
        return [live.content for live in self.current()]

    def find(self, selector: Selector) -> LiveAdapter | None:
        ref = selector.pick(self.refs())
        return next((live for live in self.current() if live.ref == ref), None)

    def serve(self, new: LiveAdapter) -> None:
        """Have requests find it, and retire what it replaces."""
        self.all.append(new)
        self.retention.retire_for(new, self.all)

    def serve_again(self, ref: AdapterRef) -> bool:
        """Whether the version is current, and not to be replaced any more if it was.

        Raises:
            AlreadyExists: the version is known with another digest.
        """
        for live in self.all:
            if _same_version(live.ref, ref) and live.ref.digest != ref.digest:
                raise AlreadyExists(
                    f"ref: {ref} is served with digest {live.ref.digest.hex()[:12]}; "
                    "publish other bytes as a new version"
                )
        served = [live for live in self.current() if live.ref == ref]
        for live in served:
            live.superseded = False
        return bool(served)

    def twin(self, digest: bytes) -> LiveAdapter | None:
        """The current version of these bytes."""
        return next((live for live in self.current() if live.ref.digest == digest), None)

    def retire(self, ref: AdapterRef, *, source: str) -> None:
        """See `AdapterRegistry.retire`."""
        for live in self.current():
            if (live.ref, live.source) == (ref, source):
                live.superseded = True
                live.retired = any(other.replaces(live) for other in self.current())

    def unused(self) -> list[LiveAdapter]:
        """Those that no request finds or uses."""
        return [live for live in self.all if live.retired and not live.pins]

    def others(self, live: LiveAdapter) -> list[LiveAdapter]:
        return [other for other in self.all if other is not live]


def _same_version(one: AdapterRef, other: AdapterRef) -> bool:
    return (one.run_id, one.adapter, one.version) == (other.run_id, other.adapter, other.version)
