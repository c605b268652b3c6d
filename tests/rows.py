"""Rows of `metrics.jsonl`, as the trainer writes them."""

from __future__ import annotations

from typing import Any


def row(step: int, **changes: Any) -> dict[str, Any]:
    """The row of a step in which all went well; reward is a tenth of the step."""
    digest = f"{step:064x}"
    return {
        "step": step,
        "version": step + 1,
        "digest": digest,
        "replicas": [{"replica_id": name, "digest": digest} for name in ("r0", "r1")],
        "reward_mean": step / 10,
        "reward_std": 0.05,
        "staleness_mean": 0.25,
        "staleness_max": 1,
        "mismatch": 0.01,
        "kl": 0.0,
        "loss": -0.5,
        "grad_norm": 1.5,
        "clip_fraction": 0.0,
        "tis_weight_mean": 1.0,
        "tokens_per_second": 118.4,
        "samples": 32,
        "samples_lost": 0,
        "update_seconds": 0.06,
        "export_seconds": 0.02,
        "wire_seconds": 0.01,
        "stage_seconds": 0.01,
        "commit_seconds": 0.02,
        "generate_seconds": 6.0,
        "train_seconds": 2.0,
        "step_seconds": 8.0,
        "completion_tokens_mean": 9.5,
        **changes,
    }
