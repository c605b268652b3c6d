"""Digests taken while the bytes come, so that nothing is read twice."""

from __future__ import annotations

from blake3 import blake3

from common.adapter import Manifest
from common.errors import WrongDigest


class Verifier:
    """Checks each tensor of a flat buffer as soon as its last byte has come.

    verifier = Verifier(manifest)
    verifier.update(data)       # again and again, in order, until all has come
    """

    def __init__(self, manifest: Manifest) -> None:
        self._specs = (spec for spec in manifest.tensors if not spec.alias_of)
        self._spec = next(self._specs, None)
        self._hash = blake3()
        self._hashed_bytes = 0

    def update(self, data: bytes | memoryview) -> None:
        """Take the next bytes of the buffer.

        Raises:
            WrongDigest: a tensor is not what its digest says; it is named.
        """
        rest = memoryview(data)
        while self._spec is not None and rest:
            part = rest[: self._spec.end_bytes - self._hashed_bytes]
            self._hash.update(part)
            self._hashed_bytes += len(part)
            rest = rest[len(part) :]
            if self._hashed_bytes == self._spec.end_bytes:
                self._check()

    def _check(self) -> None:
        assert self._spec is not None, "called at the end of a tensor"
        found = self._hash.digest()
        if found != self._spec.digest:
            raise WrongDigest(
                f"tensor {self._spec.name!r}: BLAKE3 {found.hex()[:12]} instead of "
                f"{self._spec.digest.hex()[:12]}; its bytes are not what was published"
            )
        self._spec, self._hash = next(self._specs, None), blake3()
