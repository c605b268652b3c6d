"""Which of the committed versions go on answering when another one comes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rollout_svc.versions.live import LiveAdapter


@dataclass(frozen=True, slots=True)
class Retention:
    """The limits. Versions are given oldest commit first.

    Args:
        slots: LoRA slots of the engine; one is for the next version.
        keep_versions: newest versions of an adapter that stay.
    """

    slots: int
    keep_versions: int

    def retire_for(self, newest: LiveAdapter, lives: Iterable[LiveAdapter]) -> None:
        """Retire the superseded, what is above the limit, and what merged weights replace.

        What a trainer's older run left goes once the slots are full; the last version of another
        adapter never does, unless its trainer has it no more.
        """
        lives = current(lives)
        for live in lives:
            # The engine's own weights are one version, whose bytes are gone with the next.
            in_its_place = newest.merged or live.merged
            replaced = in_its_place and live.loaded is not newest.loaded
            live.retired = replaced or (live.superseded and newest.replaces(live))
        same_adapter = [live for live in current(lives) if _key(live) == _key(newest)]
        for live in same_adapter[: -self.keep_versions]:
            live.retired = True
        left = [live for live in current(lives) if _is_of_older_run(live, newest)]
        left.sort(key=lambda live: not live.superseded)
        while left and _slots_wanted(lives) > self.slots - 1:
            left.pop(0).retired = True


def current(lives: Iterable[LiveAdapter]) -> list[LiveAdapter]:
    """Those that a new request may find."""
    return [live for live in lives if not live.retired]


def _slots_wanted(lives: Iterable[LiveAdapter]) -> int:
    """An alias shares the slot of the version it stands for."""
    return len({live.loaded.id for live in current(lives) if live.lora})


def _key(live: LiveAdapter) -> tuple[str, str]:
    return live.source, live.ref.adapter


def _is_of_older_run(live: LiveAdapter, newest: LiveAdapter) -> bool:
    return live.source == newest.source and live.ref.run_id != newest.ref.run_id
