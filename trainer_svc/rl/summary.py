"""What `summary.json` says of a run, from its rows."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any


def summarise(rows: Sequence[dict[str, Any]], *, wall_seconds: float) -> dict[str, Any]:
    """Figures of a whole run; those that need a step are None before the first one.

    `reward_first5` and `reward_last5` are means over the first and the last five steps. A version
    counts as verified when there were replicas and each reported the trainer's digest.
    """
    rewards = _finite(rows, "reward_mean")
    updates = _finite(rows, "update_seconds")
    return {
        "steps": len(rows),
        "reward_first5": fmean(rewards[:5]) if rewards else None,
        "reward_last5": fmean(rewards[-5:]) if rewards else None,
        "versions": len({row["version"] for row in rows}),
        "versions_verified": len({row["version"] for row in rows if is_verified(row)}),
        "samples": sum(row["samples"] for row in rows),
        "samples_lost": sum(row["samples_lost"] for row in rows),
        "update_seconds_p50": median(updates) if updates else None,
        "wall_seconds": wall_seconds,
    }


def is_verified(row: dict[str, Any]) -> bool:
    """Whether every replica of the row, and at least one, holds the trainer's bytes."""
    digests = {replica["digest"] for replica in row["replicas"]}
    return digests == {row["digest"]}


def _finite(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    """The values that are numbers; a row holds None where a number was not finite."""
    return [row[key] for row in rows if row[key] is not None]
