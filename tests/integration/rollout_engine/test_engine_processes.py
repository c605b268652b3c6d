"""How many processes an engine has on a CPU."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from rollout_svc.config import RolloutConfig
from rollout_svc.vllm_engine.arguments import engine_config
from rollout_svc.vllm_engine.start import RunningLlm

ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


@pytest.mark.parametrize(
    ("ranks", "binding", "executor"),
    [(1, "nobind", ONE_PROCESS), (2, "nobind", "mp"), (1, "0-1", "mp")],
)
def test_one_rank_whose_threads_nobody_binds_computes_in_the_engine_core(
    config: RolloutConfig,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    binding: str,
    executor: str,
) -> None:
    """A worker of its own has the engine core spin beside it."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", binding)
    engine = config.engine | {"tensor_parallel_size": ranks}
    made = engine_config(config.model_copy(update={"engine": engine}))
    assert made.parallel_config.distributed_executor_backend == executor


@pytest.mark.parametrize(("title", "is_rank"), [("VLLM::Worker_TP1", True), ("tracker", False)])
def test_a_rank_that_was_killed_is_missed_at_once(title: str, is_rank: bool) -> None:
    """VLLM says so once the other ranks have waited for it in vain."""
    prctl = f"import ctypes; ctypes.CDLL(None).prctl(15, {title.encode()!r})"
    code = f"{prctl}; print(flush=True); input()"
    arguments = [sys.executable, "-c", code]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        running = RunningLlm(None, [psutil.Process(process.pid)])  # type: ignore[arg-type]
        assert running.is_whole
        process.kill()
        process.wait()
        assert running.is_whole != is_rank
