"""The rules that a user of a trainer sets, by name, for replicas to follow."""

from __future__ import annotations

from typing import Literal

from common.rules import Merge, Rules, Swap

SwapName = Literal["replica", "finish", "abort", "continue"]
MergeName = Literal["replica", "never", "rollout"]
AS_CONFIGURED = "replica"
"""Each replica goes by its own configuration."""


def rules_of(*, swap: SwapName, merge: MergeName) -> Rules:
    """The same as they travel with an update."""
    return Rules(
        swap=None if swap == AS_CONFIGURED else Swap(swap),
        merge=None if merge == AS_CONFIGURED else Merge(merge),
    )
