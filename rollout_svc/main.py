"""A rollout replica as a process: `main(config)` runs until SIGTERM or the engine's death."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvloop

from common.model_dir import BaseModel, base_model
from common.tasks import stop_requested
from rollout_svc.config import RolloutConfig
from rollout_svc.replica import Replica
from rollout_svc.staging import staging_folder
from rollout_svc.vllm_environment import set_engine_defaults

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(config: RolloutConfig) -> int:
    """Serve until SIGTERM or SIGINT; 0 then. Raises what `serve` does.

    While the engine starts, either ends the process by `SystemExit(0)`.
    """
    uvloop.run(serve(config))
    return 0


async def serve(config: RolloutConfig) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: the model, the address or an engine argument cannot be used.
        EngineDead: the engine's process ended.
    """
    stop = stop_requested()
    config.security.check()
    without_weights = config.starts_without_weights
    base = (
        BaseModel(config.model.resolve().name, "") if without_weights else base_model(config.model)
    )
    replica_id = uuid.uuid4().hex
    with staging_folder(config.staging_dir, replica_id) as staging:
        set_engine_defaults()
        # Before the server, because gRPC must not be running when a process is started.
        with _exit_on_signal():
            from rollout_svc.vllm_engine import VllmEngine

            engine = await VllmEngine.start(config)
        try:
            replica = Replica(config, engine, base=base, replica_id=replica_id, staging=staging)
            await replica.serve(stop)
        finally:
            await asyncio.to_thread(engine.shutdown)


@contextmanager
def _exit_on_signal() -> Iterator[None]:
    """SIGTERM and SIGINT raise here: vLLM holds the event loop while it starts."""
    previous = {number: signal.signal(number, _exit) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _exit(_number: int, _frame: FrameType | None) -> None:
    # A second signal must not cut the clean-up short.
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise SystemExit(0)
