"""Runs inside every vLLM worker: ends vLLM's processes when the replica was killed.

Workers end with their engine core, but nothing ends that: it would keep its memory, the
accelerator's as well, and the next replica on the machine would find none.
"""

from __future__ import annotations

import os
import select
import signal
import threading


def end_with(replica_pid: int) -> None:
    """Have this process, and the engine core above it, end when the replica's process does."""
    watched = os.pidfd_open(replica_pid)
    threading.Thread(
        target=_wait, args=(watched, replica_pid, os.getppid()), name="orphan", daemon=True
    ).start()


def _wait(watched: int, replica_pid: int, parent_pid: int) -> None:
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.poll()
    # With one worker the engine core is this process, and the replica its parent.
    if parent_pid not in (replica_pid, 1) and os.getppid() == parent_pid:
        os.kill(parent_pid, signal.SIGKILL)
    os._exit(1)
