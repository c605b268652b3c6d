"""A rollout replica as a process: `main(config)` runs until SIGTERM or the engine's death."""

from __future__ import annotations

import asyncio
import uuid

import uvloop

from common.model_dir import base_model
from common.tasks import stop_requested
from rollout_svc.config import RolloutConfig
from rollout_svc.replica import Replica
from rollout_svc.staging import staging_folder
from rollout_svc.vllm_environment import set_engine_defaults


def main(config: RolloutConfig) -> int:
    """Serve until SIGTERM or SIGINT; 0 then. Raises what `serve` does."""
    uvloop.run(serve(config))
    return 0


async def serve(config: RolloutConfig) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: the model, the address or an engine argument cannot be used.
        EngineDead: the engine's process ended.
    """
    stop = stop_requested()
    base = base_model(config.model)
    replica_id = uuid.uuid4().hex
    with staging_folder(config.staging_dir, replica_id) as staging:
        set_engine_defaults()
        from rollout_svc.vllm_engine import VllmEngine

        # Before the server, because gRPC must not be running when a process is started.
        engine = await VllmEngine.start(config)
        try:
            replica = Replica(config, engine, base=base, replica_id=replica_id, staging=staging)
            await replica.serve(stop)
        finally:
            await asyncio.to_thread(engine.shutdown)
