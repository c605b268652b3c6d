"""The versions a trainer keeps: immutable, known by digest, one buffer each for all subscribers."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from common.adapter import BASE_NAME, AdapterRef, Canary, Manifest
from common.errors import AdapterNotFound, AlreadyExists, InvalidField
from common.rules import Rules
from common.stream.content import Content

_MAX_ADAPTER_CHARACTERS = 256
_MAX_VERSION = 2**63 - 1


class VersionStore:
    """The newest `keep` versions of every adapter of one run, and those that are pinned.

    Each is a buffer in memory: of an adapter, or of a whole model where versions are merged.
    """

    def __init__(self, run_id: str, *, keep: int) -> None:
        self.run_id = run_id
        self._keep = keep
        self._versions: dict[str, list[Content]] = {}
        self._pins: Counter[AdapterRef] = Counter()

    def add(
        self,
        adapter: str,
        manifest: Manifest,
        buffer: memoryview,
        *,
        version: int,
        canary: Canary | None = None,
        rules: Rules = Rules(),  # noqa: B008 - frozen
    ) -> AdapterRef:
        """Take a version; the same one again changes nothing.

        Bytes that another kept version has already are kept once.

        Raises:
            InvalidField: the name or the number is none that a replica could be told.
            AlreadyExists: the number is taken, by other bytes or by a version that is gone.
        """
        _check_name(adapter)
        _check_version(version)
        ref = AdapterRef(self.run_id, adapter, version, manifest.digest())
        kept = self._versions.setdefault(adapter, [])
        if ref in self.refs():
            return ref
        if kept and version <= kept[-1].ref.version:
            raise AlreadyExists(
                f"version: {adapter}@{version} cannot be published as {ref}: versions are "
                f"immutable and grow, the newest is {kept[-1].ref}; use a higher one"
            )
        twin = self.with_digest(ref.digest)
        if twin is not None:
            manifest, buffer = twin.manifest, twin.buffer
        kept.append(Content.whole(ref, manifest, buffer, canary=canary, rules=rules))
        self._drop_old()
        return ref

    def refs(self) -> list[AdapterRef]:
        """The versions kept, those of an adapter oldest first."""
        return [content.ref for content in self._all()]

    def newest(self, adapter: str) -> Content | None:
        kept = self._versions.get(adapter)
        return kept[-1] if kept else None

    def adapters(self) -> list[str]:
        return list(self._versions)

    def find(self, ref: AdapterRef) -> Content | None:
        return next((content for content in self._all() if content.ref == ref), None)

    def with_digest(self, digest: bytes) -> Content | None:
        return next((content for content in self._all() if content.ref.digest == digest), None)

    @contextlib.contextmanager
    def pinned(self, adapter: str, version: int) -> Iterator[AdapterRef]:
        """Keep a version, here and on the replicas, for as long as the block runs.

        Raises:
            AdapterNotFound: it is not kept any more.
        """
        found = (ref for ref in self.refs() if (ref.adapter, ref.version) == (adapter, version))
        ref = next(found, None)
        if ref is None:
            raise AdapterNotFound(f"version: {adapter}@{version} is not kept; pin one that is")
        self._pins[ref] += 1
        try:
            yield ref
        finally:
            self._pins[ref] -= 1
            self._drop_old()

    def _drop_old(self) -> None:
        for adapter, kept in self._versions.items():
            newest = kept[-self._keep :]
            self._versions[adapter] = [c for c in kept if c in newest or self._pins[c.ref]]

    def _all(self) -> list[Content]:
        return [content for kept in list(self._versions.values()) for content in kept]


def _check_name(adapter: str) -> None:
    if not isinstance(adapter, str) or not 1 <= len(adapter) <= _MAX_ADAPTER_CHARACTERS:
        raise InvalidField(
            f"adapter: {ascii(adapter)[:80]}; give a name of 1 to {_MAX_ADAPTER_CHARACTERS} "
            "characters"
        )
    if adapter == BASE_NAME:
        raise InvalidField(f"adapter: {BASE_NAME!r} stands for the base model; rename it")
    try:
        adapter.encode()
    except UnicodeEncodeError:
        raise InvalidField(
            f"adapter: {ascii(adapter)[:80]} is not Unicode text; rename it"
        ) from None


def _check_version(version: int) -> None:
    if not isinstance(version, int) or not 1 <= version <= _MAX_VERSION:
        raise InvalidField(f"version: {version!r}; give a number from 1 to 2**63 - 1")
