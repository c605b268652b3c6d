"""How a staged version is loaded and takes over: the swap rules."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common.adapter import AdapterRef, Kind
from common.errors import RefitError, Unavailable
from common.rules import Swap
from common.stream.content import Content
from common.tasks import see_through
from rollout_svc.engine import BoundReport, Engine, EngineAdapter
from rollout_svc.life.pauses import EnginePause
from rollout_svc.versions.binding import refuse_unbound
from rollout_svc.versions.canary import check_canary
from rollout_svc.versions.live import LiveAdapter, Successor
from rollout_svc.versions.slots import Slots
from rollout_svc.versions.uses import Uses, Which
from rollout_svc.versions.weights import BASE, EngineWeights, Loaded

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Committed:
    """What each rank bound; nothing when the version was served already, or is an alias."""

    reports: list[BoundReport]
    canary_difference: float | None = None


@dataclass(slots=True)
class Commits:
    """Loads one version at a time, and switches by `serve`, in one step.

    Whatever fails, what was served before is served on; under a rule that ends or changes running
    requests these may have ended with the tokens they had.

    Args:
        lives: every version that is loaded or staged, oldest commit first; the registry's own list.
        serve: makes a version the one that new requests find.
        wait_seconds: how long running requests are waited for.
    """

    engine: Engine
    lives: list[LiveAdapter]
    serve: Callable[[LiveAdapter], None]
    uses: Uses
    slots: Slots
    weights: EngineWeights
    pause: EnginePause
    wait_seconds: float
    _serials: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _marks: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    async def into_slot(
        self, content: Content, path: Path, *, source: str, swap: Swap
    ) -> Committed:
        """Serve an adapter from a LoRA slot.

        Raises:
            Incompatible: a tensor found no module, or the engine refused it.
            CanaryRefused: its log-probabilities are not the trainer's.
            Unavailable: no slot came free in time, or the engine is gone.
        """
        new = LiveAdapter(content, self._named(content.ref, path), source)
        reports = await self.slots.load_next(new.loaded, wait_seconds=self.wait_seconds)
        try:
            refuse_unbound(content.ref, reports)
            if self.weights.loaded == BASE:
                difference = await self._check_canary(new)
                await see_through(self._take_over(new, swap))
            else:
                difference = await self._replace_weights(new, BASE, swap)
        except BaseException:
            # A dead engine's error must not take the place of a cancellation that is under way.
            with contextlib.suppress(RefitError):
                if new not in self.lives:
                    await self.slots.drop(new.loaded.id)
            raise
        return Committed(reports, difference)

    async def into_weights(
        self, content: Content, path: Path, *, source: str, swap: Swap
    ) -> Committed:
        """Serve a version from the engine's own weights, or load the base that was sent.

        Raises:
            Incompatible: a tensor found no place, or a rank refused it.
            CanaryRefused: its log-probabilities are not the trainer's.
            Unavailable: running requests did not end in time, or the engine is gone.
        """
        reports = await self.weights.check(content, path)
        is_adapter = content.manifest.kind is Kind.LORA
        wanted = Loaded(summed=path) if is_adapter else Loaded(whole=path)
        new = LiveAdapter(content, self._named(content.ref, path), source, merged=True)
        return Committed(reports, await self._replace_weights(new, wanted, swap))

    def _named(self, ref: AdapterRef, path: Path) -> EngineAdapter:
        serial = next(self._serials)
        name = f"{ref.adapter}@{ref.version}-{ref.digest.hex()[:16]}-{serial}"
        return EngineAdapter(serial, name, path)

    async def _check_canary(self, new: LiveAdapter) -> float | None:
        if not new.content.canary:
            return None
        return await check_canary(self.engine, new.lora, new.content.canary, ref=new.ref)

    async def _take_over(self, new: LiveAdapter, swap: Swap) -> None:
        """The switch of a version that is in a slot of its own."""
        if swap is Swap.CONTINUE:
            await self._move_requests(new)
            return
        self.serve(new)
        if swap is Swap.ABORT:
            await self.end_replaced(new)

    async def end_replaced(self, new: LiveAdapter) -> None:
        """Have running requests of versions before it end with the tokens they have."""
        await self._end_older(lambda live: live is not None and new.replaces(live))

    async def _end_older(self, which: Which) -> None:
        try:
            await self.uses.end(which, wait_seconds=self.wait_seconds)
        except Unavailable as error:
            log.warning("after a swap: %s", error)

    async def _move_requests(self, new: LiveAdapter) -> None:
        """Put the new bytes into the slots that running requests of older versions use, and serve.

        The newest of these slots is the new version's from then on, so that requests which outlast
        many versions need no more of them. A slot that is another adapter's too is left alone,
        and requests end there as they began.
        """
        with self.uses.closed():
            await self._begin_anew(lambda live: live is not None and new.replaces(live))
            ids = self._slots_of_older(new)
            if not ids:
                self.serve(new)
                return
            spare = new.loaded
            try:
                async with self.pause.held():
                    for slot_id in ids:
                        moved = EngineAdapter(slot_id, spare.name, spare.path)
                        refuse_unbound(new.ref, await self.slots.overwrite(moved))
                    mark = await self._mark()
            except BaseException:
                await self._give_up_slots(ids)
                raise
            new.loaded = moved
            for live in self.lives:
                if live.loaded.id in ids and live is not new:
                    live.retired = True
                    live.successors.append(_settled(mark, new.ref))
            # In one step with the retirement: LATEST always finds a version.
            self.serve(new)
        await self.slots.drop(spare.id)

    async def _begin_anew(self, which: Which) -> None:
        """Requests that wait in the engine for their turn, or are in their prompt: going on, they
        would read a prefix that the older weights left, and say that the new ones made it all."""
        await self.uses.begin_anew(which, wait_seconds=self.wait_seconds)

    def _slots_of_older(self, new: LiveAdapter) -> list[int]:
        """Those that running requests of older versions use, and of nobody else."""
        others = [live for live in self.lives if live is not new and not new.replaces(live)]
        shared = {live.loaded.id for live in others}
        older = [live for live in self.lives if live.pins and new.replaces(live) and live.lora]
        ids = {live.loaded.id for live in older} - shared
        return sorted(slot_id for slot_id in ids if self.slots.holds(slot_id))

    async def _give_up_slots(self, ids: list[int]) -> None:
        """Nobody knows what is in them now: their requests end, and versions are loaded anew."""
        self._rename(lambda live: live.loaded.id in ids)
        await self._end_older(lambda live: live is not None and live.loaded.id in ids)
        for slot_id in ids:
            with contextlib.suppress(RefitError):
                await self.slots.drop(slot_id)

    async def _replace_weights(self, new: LiveAdapter, wanted: Loaded, swap: Swap) -> float | None:
        """The switch of a version that comes with other weights of the engine's own."""

        def goes_on(live: LiveAdapter | None) -> bool:
            moves = swap is Swap.CONTINUE and new.merged
            return moves and live is not None and live.merged and new.replaces(live)

        def must_end(live: LiveAdapter | None) -> bool:
            return not goes_on(live)

        with self.uses.closed():
            await self._begin_anew(goes_on)
            if swap is not Swap.FINISH:
                await self.uses.end(must_end, wait_seconds=self.wait_seconds)
            await self.uses.wait_for_end(must_end, wait_seconds=self.wait_seconds)
            return await see_through(self._exchange(new, wanted))

    async def _exchange(self, new: LiveAdapter, wanted: Loaded) -> float | None:
        """Requests that still run go on under what is loaded here."""
        before, successor = self.weights.loaded, Successor(0, new.ref)
        going_on = [live for live in self.lives if live.pins]
        try:
            async with self.pause.held():
                await self.weights.put(wanted, new.ref)
                if going_on:
                    successor.mark = await self._mark()
                for live in going_on:
                    live.successors.append(successor)
            difference = await self._check_canary(new)
        except BaseException:
            successor.settle(False)
            if self.weights.loaded != before:
                await self._take_back(before, going_on)
            raise
        successor.settle(True)
        self.weights.settle(new.content, source=new.source)
        if new.content.manifest.kind is not Kind.BASE:
            self.serve(new)
        return difference

    async def _take_back(self, before: Loaded, going_on: list[LiveAdapter]) -> None:
        """The weights from before; requests that met the refused ones end."""
        try:
            async with self.pause.held():
                await self.weights.put_back(before)
                await self._mark()
        except RefitError as error:
            self.weights.give_up(before, str(error))
        if going_on:
            self._rename(lambda live: live.merged)
        await self._end_older(lambda live: live in going_on)

    def _rename(self, which: Callable[[LiveAdapter], bool]) -> None:
        """Have these versions go on under other names: what requests that met a refused one left in
        the prefix cache is of no version."""
        for live in [live for live in self.lives if which(live) and not live.retired]:
            live.retired = True
            loaded = self._named(live.ref, live.loaded.path)
            self.lives.append(LiveAdapter(live.content, loaded, live.source, merged=live.merged))

    async def _mark(self) -> int:
        mark = next(self._marks)
        await self.engine.mark_weights(mark)
        return mark


def _settled(mark: int, ref: AdapterRef) -> Successor:
    successor = Successor(mark, ref)
    successor.settle(True)
    return successor
