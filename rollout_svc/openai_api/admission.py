"""The admission of an HTTP request: which version answers it, and how it is known to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from common.adapter import AdapterRef
from rollout_svc.openai_api.models import model_name
from rollout_svc.versions.live import Admitted


@dataclass(slots=True)
class Admission:
    """One request; all that it generates, from several prompts perhaps, is one version's.

    Args:
        request_id: the engine's, for each of its generations.
        asked: its `model`.
        admitted: who answers.
        admit: lets it in anew.
    """

    request_id: str
    asked: str
    admitted: Admitted
    admit: Callable[[], Awaitable[Admitted]]
    first: AdapterRef | None = field(init=False)
    """Whose name vLLM writes into the answer."""

    newest: AdapterRef | None = field(init=False)
    """The newest version that made any of its tokens: another one under swap rule `continue`."""

    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.first = self.newest = self.admitted.ref

    async def again(self) -> None:
        """Be admitted anew, once for all that it generates."""
        async with self._changing:
            if self.admitted.use.anew:
                self.admitted = await self.admit()
                self.newest = self.admitted.ref

    def was_made_by(self, maker: AdapterRef | None) -> None:
        """Note who made some of its tokens; one choice may be behind another."""
        if self.newest and maker and maker.version > self.newest.version:
            self.newest = maker

    @property
    def model(self) -> str:
        """Who answered first, by the name that no other version has here."""
        return model_name(self.first)


_current: ContextVar[Admission | None] = ContextVar("openai_admission", default=None)


def current_admission() -> Admission | None:
    """That of the request which this task answers; None where it needed none."""
    return _current.get()


@contextmanager
def answering(admission: Admission) -> Iterator[None]:
    """The tasks that are started inside the block answer this request."""
    token = _current.set(admission)
    try:
        yield
    finally:
        _current.reset(token)
