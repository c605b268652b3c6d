"""How many processes an engine has on a CPU."""

from __future__ import annotations

import pytest

from rollout_svc.config import RolloutConfig
from rollout_svc.vllm_engine.arguments import engine_config

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
