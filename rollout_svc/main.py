"""A rollout replica as a process: `main(config)` runs until SIGTERM or the engine's death."""

from __future__ import annotations

import asyncio
import importlib
import uuid
from typing import TYPE_CHECKING

import uvloop

from common.model_dir import BaseModel, base_model
from common.tasks import cancel, first_of, stop_requested
from rollout_svc.config import RolloutConfig
from rollout_svc.replica import Replica
from rollout_svc.updates.staging import staging_folder
from rollout_svc.vllm_engine.environment import set_engine_defaults

if TYPE_CHECKING:
    from rollout_svc.vllm_engine.engine import VllmEngine


def main(config: RolloutConfig) -> int:
    """Serve until SIGTERM or SIGINT; 0 then. Raises what `serve` does."""
    uvloop.run(serve(config))
    return 0


async def serve(config: RolloutConfig) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: the model, the address or an engine argument cannot be used.
        EngineDead: the engine did not start, or ended and was restarted in vain.
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
        engine = await _started(config, stop)
        if engine is None:
            return
        try:
            replica = Replica(config, engine, base=base, replica_id=replica_id, staging=staging)
            await replica.serve(stop)
        finally:
            await asyncio.to_thread(engine.shutdown)


async def _started(config: RolloutConfig, stop: asyncio.Event) -> VllmEngine | None:
    """None: it was to stop before the engine had started."""
    starting = asyncio.ensure_future(_start(config))
    try:
        return starting.result() if await first_of(stop, starting) else None
    finally:
        await cancel(starting)


async def _start(config: RolloutConfig) -> VllmEngine:
    # Seconds of imports; in a thread, so that a signal is heard.
    module = await asyncio.to_thread(importlib.import_module, "rollout_svc.vllm_engine.engine")
    engine: VllmEngine = await module.VllmEngine.start(config)
    return engine
