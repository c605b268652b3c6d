"""What a row of `metrics.jsonl` says of a step's samples and of the update after it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

from common.adapter import AdapterRef
from trainer_svc.fleet import Replica
from trainer_svc.rl.groups import StepSamples


def describe_samples(samples: StepSamples) -> dict[str, Any]:
    """Counts and means; `generate_seconds` is how long the samples took, training or not.

    `samples_mixed` have tokens of several versions; `samples_resumed` were cut off and went on.
    """
    rewards = [reward for group in samples.groups for reward in group.rewards]
    completions = [c for group in samples.groups for c in group.completions]
    lengths = [len(completion.token_ids) for completion in completions]
    return {
        "samples": len(rewards),
        "samples_lost": samples.lost,
        "samples_stale": samples.stale,
        "samples_mixed": sum(len(completion.versions) > 1 for completion in completions),
        "samples_resumed": sum(completion.resumed > 0 for completion in completions),
        "hedged": sum(group.hedged for group in samples.groups),
        "reward_mean": fmean(rewards),
        "reward_std": pstdev(rewards),
        "completion_tokens_mean": fmean(lengths),
        "tokens_per_second": sum(lengths) / samples.seconds,
        "generate_seconds": samples.seconds,
    }


def describe_update(ref: AdapterRef, replicas: Sequence[Replica]) -> dict[str, Any]:
    """The version, each replica's own digest of it, and how the slowest replica took it."""
    slowest = max(replicas, key=_seconds)
    reported = {r.id: r.committed[ref.adapter, ref.version] for r in replicas}
    return {
        "version": ref.version,
        "digest": ref.digest.hex(),
        "replicas": [
            {"replica_id": name, "digest": found.digest.hex()} for name, found in reported.items()
        ],
        "wire_seconds": slowest.timings.wire_seconds,
        "stage_seconds": slowest.timings.stage_seconds,
        "commit_seconds": slowest.timings.commit_seconds,
        "wire_bytes": slowest.wire_bytes,
        "canary_difference": slowest.canary_difference,
    }


def _seconds(replica: Replica) -> float:
    timings = replica.timings
    return timings.wire_seconds + timings.stage_seconds + timings.commit_seconds
