from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.timeout(30)
_SECONDS = 10
_WORKER = """
import os, sys, time
from rollout_svc.worker.orphans import end_with
end_with(int(sys.argv[1]))
print(os.getppid(), os.getpid(), flush=True)
time.sleep(60)
"""
_CORE = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[1]])
"""
_REPLICA = """
import os, subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], str(os.getpid()), *sys.argv[2:]])
"""


@pytest.mark.parametrize("below", [(_CORE, _WORKER), (_WORKER,)])
def test_vllms_processes_end_with_a_replica_that_is_killed(below: tuple[str, ...]) -> None:
    """faults.md 27, vllm#42207: with an engine core above the worker, and with one that is it."""
    command = [sys.executable, "-c", _REPLICA, *below]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as replica:
        assert replica.stdout is not None
        pids = set(map(int, replica.stdout.readline().split())) - {replica.pid}
        assert len(pids) == len(below)
        started = [psutil.Process(pid) for pid in pids]
        replica.kill()
        gone, alive = psutil.wait_procs(started, timeout=_SECONDS)
    assert (len(gone), alive) == (len(below), [])
