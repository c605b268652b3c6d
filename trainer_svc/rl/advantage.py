"""Advantages from rewards; plain Python, since the service process computes them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def group_advantages(
    rewards: Sequence[float], *, normalise: bool = True, eps: float = 1e-6
) -> list[float]:
    """Advantage of every sample of one prompt's group: (r - mean) / (std + eps).

    Source: GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision, with the
    population's deviation. Without `normalise` it is r - mean, as Dr. GRPO (arXiv 2503.20783)
    argues for. A group of equal rewards gives exact zeros.

    Raises:
        ValueError: an empty group, or a reward that is not finite.
    """
    if not rewards or not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards: found {list(rewards)}; a group needs finite rewards")
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalise:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / len(centred))
    return [c / (std + eps) for c in centred]
