"""Engines whose weights change, one at a time: a second in one process ends the first.

The fixtures are those of `rollout_engine`, made anew for this directory.
"""

from __future__ import annotations

from tests.integration.rollout_engine.conftest import (
    adapters,
    config,
    engine,
    model_dir,
    reference,
    registry,
)

__all__ = ["adapters", "config", "engine", "model_dir", "reference", "registry"]
