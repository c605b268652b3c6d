"""A version that was handed over, and what became of it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from trainer_svc.library.server_process import result_of
from trainer_svc.megatron.protocol import Json

_DIGEST_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Published:
    """One version of an adapter; `AdapterPublisher.publish` returns it before it is hashed."""

    adapter: str
    version: int
    _sealed: Future[Json] = field(repr=False, compare=False)

    def digest(self, *, timeout_seconds: float = _DIGEST_SECONDS) -> bytes:
        """Wait for the BLAKE3, 32 bytes, that names the content on every replica.

        Raises:
            Unavailable: the server ended before it had the version.
            WaitExpired: it took longer than `timeout_seconds`.
        """
        reply = result_of(self._sealed, command="publish", timeout_seconds=timeout_seconds)
        return bytes.fromhex(reply["digest"])
