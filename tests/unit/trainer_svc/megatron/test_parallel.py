"""Process groups of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_svc.megatron import parallel
from trainer_svc.megatron.settings import ParallelSettings


@pytest.mark.usefixtures("ranks")
def test_a_second_start_ends_the_groups_of_the_first() -> None:
    """A group of gloo's that is left has three threads, of which one wakes 100 times a second."""
    parallel.start(ParallelSettings())
    threads = num_threads()
    parallel.start(ParallelSettings())
    assert num_threads() <= threads
    assert parallel.dp_group().size() == 1


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))
