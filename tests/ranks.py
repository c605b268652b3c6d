"""Functions that run on several ranks, each a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

J = TypeVar("J")


def run_ranks(
    run: Callable[[J], None], job: J, *, num_ranks: int, store: Path, deadline_seconds: float
) -> None:
    """Call `run(job)` on every rank of a gloo group that meets at the file `store`.

    Raises:
        ProcessRaisedException: `run` failed on a rank, with its traceback.
        TimeoutError: they did not end in time; no process is left.
    """
    deadline = time.monotonic() + deadline_seconds
    context = start_processes(  # type: ignore[no-untyped-call]
        _run_rank, args=(run, job, num_ranks, store), nprocs=num_ranks, join=False
    )
    try:
        while not context.join(max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{num_ranks} ranks did not end in {deadline_seconds:g} s")
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def _run_rank(rank: int, run: Callable[[J], None], job: J, num_ranks: int, store: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    run(job)
    dist.destroy_process_group()
