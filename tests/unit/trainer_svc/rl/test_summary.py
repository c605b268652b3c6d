from __future__ import annotations

from tests.rows import row
from trainer_svc.rl.summary import is_verified, summarise


def test_before_the_first_step() -> None:
    assert summarise([], wall_seconds=2.5) == {
        "steps": 0,
        "reward_first5": None,
        "reward_last5": None,
        "versions": 0,
        "versions_verified": 0,
        "samples": 0,
        "samples_lost": 0,
        "update_seconds_p50": None,
        "wall_seconds": 2.5,
    }


def test_verified_means_every_replica() -> None:
    good, bad = {"replica_id": "a", "digest": "11"}, {"replica_id": "b", "digest": "22"}
    assert is_verified(row(1, digest="11", replicas=[good]))
    assert not is_verified(row(1, digest="11", replicas=[good, bad]))
    assert not is_verified(row(1, digest="11", replicas=[bad]))
    assert not is_verified(row(1, digest="11", replicas=[]))
