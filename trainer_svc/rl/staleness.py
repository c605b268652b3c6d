"""How old a sample may be when it is trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """`max_staleness` versions between the one that made a sample and the one that is trained.

    With "wait" a prompt goes only to replicas whose answer is sure to be fresh enough when its step
    trains. With "drop" it goes to any replica that is fresh enough now; what is too old when its
    step trains is thrown away.
    """

    max_staleness: int
    stale: Literal["drop", "wait"]

    def oldest_asked(self, current: int, *, ahead: int, first: int) -> int:
        """The oldest version that may answer.

        Args:
            current: the newest version published.
            ahead: steps to be trained before the one sampled for; each makes a version.
            first: the oldest version that descends from the policy under training. What came before
                a restart from a checkpoint does not.
        """
        steps = ahead if self.stale == "wait" else 0
        return max(first, current + steps - self.max_staleness)

    def is_fresh(self, version: int, *, current: int) -> bool:
        """Whether a sample made by `version` may train the policy that `current` names."""
        return current - version <= self.max_staleness


def describe_staleness(staleness: Sequence[int]) -> dict[str, object]:
    """A row's share: how many samples had which staleness, as {"0": 56, "1": 8}."""
    return {
        "staleness": {str(value): count for value, count in sorted(Counter(staleness).items())},
        "staleness_mean": fmean(staleness),
        "staleness_max": max(staleness),
    }
