"""The picture of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]
_BLUE, _ORANGE = "#1f5fa8", "#d1661f"


def reward_png(rows: Sequence[Row], path: Path) -> Path:
    """Draw reward, mismatch, staleness and update time against the step, as a PNG.

    Returns:
        `path`, whose folder must exist.
    """
    # The figure's own canvas, not pyplot: no global state and no display is looked for.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    (reward, mismatch), (staleness, update) = figure.subplots(2, 2, sharex=True)
    _draw_reward(reward, rows)
    _draw(mismatch, rows, "mismatch", title="Mismatch of log-probabilities")
    _draw(staleness, rows, "staleness_mean", title="Staleness in versions", label="mean")
    _draw(staleness, rows, "staleness_max", label="highest", color=_ORANGE)
    _legend(staleness)
    _draw(update, rows, "update_seconds", title="Update time in ms", factor=1000.0)
    for axes in (staleness, update):
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in (mismatch, staleness, update):
        axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=120, format="png")
    return path


def _draw_reward(axes: Axes, rows: Sequence[Row]) -> None:
    """The mean, and one standard deviation of the samples around it."""
    _draw(axes, rows, "reward_mean", title="Mean reward")
    means, spreads = _values(rows, "reward_mean"), _values(rows, "reward_std")
    axes.fill_between(
        _values(rows, "step"),
        [mean - spread for mean, spread in zip(means, spreads, strict=True)],
        [mean + spread for mean, spread in zip(means, spreads, strict=True)],
        color=_BLUE,
        alpha=0.15,
        linewidth=0,
        label="± one standard deviation",
    )
    _legend(axes)


def _draw(
    axes: Axes,
    rows: Sequence[Row],
    key: str,
    *,
    title: str = "",
    label: str = "",
    color: str = _BLUE,
    factor: float = 1.0,
) -> None:
    values = [value * factor for value in _values(rows, key)]
    axes.plot(_values(rows, "step"), values, ".-", color=color, label=label or "_nolegend_")
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(axes: Axes) -> None:
    """Beside the title, where it hides no line."""
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=9)


def _values(rows: Sequence[Row], key: str) -> list[float]:
    """The column, with a gap where a number was not finite."""
    return [math.nan if row[key] is None else float(row[key]) for row in rows]
