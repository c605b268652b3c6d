"""A committed version, and who made the tokens of the requests that were admitted to it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from common.adapter import AdapterRef
from common.stream.content import Content
from rollout_svc.engine import EngineAdapter, FinishReason, TokenDelta


@dataclass(slots=True, eq=False)
class Successor:
    """The version under which running requests go on, from weights mark `mark` on.

    Whether it `stands` is known once `settled`; a refused one leaves no tokens.
    """

    mark: int
    ref: AdapterRef
    stands: bool = False
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    def settle(self, stands: bool) -> None:
        self.stands = stands
        self.settled.set()


@dataclass(slots=True, eq=False)
class LiveAdapter:
    """A committed version. Once `retired` no new request finds it; it goes with its last pin.

    A `superseded` one answers until its adapter has another version.
    """

    content: Content
    loaded: EngineAdapter
    source: str
    """The trainer it came from."""

    merged: bool = False
    """The engine's own weights are this version."""

    pins: int = 0
    retired: bool = False
    superseded: bool = False
    successors: list[Successor] = field(default_factory=list)

    @property
    def ref(self) -> AdapterRef:
        return self.content.ref

    @property
    def lora(self) -> EngineAdapter | None:
        """What sits in a LoRA slot; None where the engine's own weights are this version."""
        return None if self.merged else self.loaded

    @property
    def cache_salt(self) -> str:
        """Names what the prefix cache holds of it. A name is never used for other bytes, and blocks
        that running requests computed under a successor are read by nobody after them."""
        return self.loaded.name

    def replaces(self, other: LiveAdapter) -> bool:
        """Whether it is another version of the same adapter, or of another run of its trainer."""
        same_run = self.ref.run_id == other.ref.run_id
        same_adapter = self.ref.adapter == other.ref.adapter
        same_source = self.source == other.source
        return self is not other and same_source and (same_adapter or not same_run)


@dataclass(slots=True, eq=False)
class Use:
    """What one request holds: a version, or with None the base model.

    Once tokens of it are known, it has `begun`; before that, a swap may want it admitted `anew`.
    """

    live: LiveAdapter | None
    begun: bool = False
    anew: bool = False


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that was let in.

    `adapter` is what the engine is to be given: None for weights of the engine's own.
    """

    use: Use

    @property
    def live(self) -> LiveAdapter | None:
        return self.use.live

    def goes_on(self) -> bool:
        """Call with each delta, before it is used; where it does not, the request is to be admitted
        anew."""
        self.use.begun |= not self.use.anew
        return self.use.begun

    @property
    def ref(self) -> AdapterRef | None:
        """The version that it was admitted to."""
        return self.live.ref if self.live else None

    @property
    def adapter(self) -> EngineAdapter | None:
        return self.live.lora if self.live else None

    @property
    def cache_salt(self) -> str:
        return self.live.cache_salt if self.live else "base"

    async def attribute(self, delta: TokenDelta) -> tuple[TokenDelta, AdapterRef | None]:
        """Who made the delta's tokens; those of a version that was refused after all are cut off,
        and its completion ends with ABORT."""
        if self.live is None:
            return delta, None
        came = [s for s in self.live.successors if s.mark <= delta.mark]
        if not came:
            return delta, self.ref
        await came[-1].settled.wait()
        if came[-1].stands:
            return delta, came[-1].ref
        reason = FinishReason.ABORT if delta.finish_reason else None
        return TokenDelta(delta.index, (), (), "", reason, mark=delta.mark), self.ref
