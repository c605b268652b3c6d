"""Which of the loaded versions go on answering when another one comes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.adapter import AdapterRef, Kind
from common.errors import Unavailable
from common.stream.content import Content
from rollout_svc.engine import EngineAdapter


@dataclass(slots=True, eq=False)
class LiveAdapter:
    """A loaded version. Once `retired` no new request finds it; it goes with its last pin.

    A `superseded` one answers until its adapter has another version.
    """

    content: Content
    loaded: EngineAdapter
    source: str
    """The trainer it came from."""

    pins: int = 0
    retired: bool = False
    superseded: bool = False

    @property
    def ref(self) -> AdapterRef:
        return self.content.ref

    @property
    def lora(self) -> EngineAdapter | None:
        """What sits in a LoRA slot; None where the engine's own weights are this version."""
        return self.loaded if self.content.manifest.kind is Kind.LORA else None

    def replaces(self, other: LiveAdapter) -> bool:
        """Whether it is another version of the same adapter, or of another run of its trainer."""
        same_run = self.ref.run_id == other.ref.run_id
        same_adapter = self.ref.adapter == other.ref.adapter
        same_source = self.source == other.source
        return self is not other and same_source and (same_adapter or not same_run)


@dataclass(frozen=True, slots=True)
class Retention:
    """The limits. Versions are given oldest commit first.

    Args:
        slots: LoRA slots of the engine; one is for the next version, so this many minus one stay.
        keep_versions: newest versions of an adapter that stay.
    """

    slots: int
    keep_versions: int

    def retire_for(self, newest: LiveAdapter, lives: Iterable[LiveAdapter]) -> None:
        """Retire the superseded and what is above a limit, of versions or slots.

        The last version of an adapter never goes to make room for another adapter's, unless its
        trainer has it no more; what a trainer's older run left is the first to go.
        """
        lives = [live for live in lives if not live.retired]
        for live in lives:
            live.retired = live.superseded and newest.replaces(live)
        same_adapter = [v for v in current(lives) if _key(v) == _key(newest)]
        for live in same_adapter[: -self.keep_versions]:
            live.retired = True
        needed = _slots(_last_ones(lives, source=newest.source, run_id=newest.ref.run_id))
        spare = [live for live in current(lives) if live.loaded.id not in needed]
        spare.sort(key=lambda live: (not _is_of_older_run(live, newest), not live.superseded))
        while spare and slots_used(current(lives)) > self.slots - 1:
            spare.pop(0).retired = True

    def check_room(self, ref: AdapterRef, lives: Iterable[LiveAdapter], *, source: str) -> None:
        """Raises `Unavailable` when only other adapters' last versions could make room."""
        last = _last_ones(lives, source=source, run_id=ref.run_id)
        others = [live for live in last if _key(live) != (source, ref.adapter)]
        if slots_used(others) >= self.slots - 1:
            raise Unavailable(
                f"max_loras: {self.slots} slots, one of them for the next version, hold "
                f"{len(others)} other adapters; raise max_loras or serve fewer adapters"
            )


def current(lives: Iterable[LiveAdapter]) -> list[LiveAdapter]:
    """Those that a new request may find."""
    return [live for live in lives if not live.retired]


def slots_used(lives: Iterable[LiveAdapter]) -> int:
    """An alias shares the slot of the version it stands for."""
    return len(_slots(lives))


def _slots(lives: Iterable[LiveAdapter]) -> set[int]:
    return {live.loaded.id for live in lives if live.lora}


def _key(live: LiveAdapter) -> tuple[str, str]:
    return live.source, live.ref.adapter


def _last_ones(lives: Iterable[LiveAdapter], *, source: str, run_id: str) -> list[LiveAdapter]:
    """Each adapter's last version, where its trainer still has it.

    Args:
        source: a trainer; it has one run, and so nothing of its older ones.
        run_id: that run.
    """
    counted = [
        live
        for live in current(lives)
        if not live.superseded and (live.source != source or live.ref.run_id == run_id)
    ]
    return list({_key(live): live for live in counted}.values())


def _is_of_older_run(live: LiveAdapter, newest: LiveAdapter) -> bool:
    return live.source == newest.source and live.ref.run_id != newest.ref.run_id
