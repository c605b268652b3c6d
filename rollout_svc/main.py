"""A rollout replica as a process: `main(config)` runs until SIGTERM or the engine's death."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import sys
import uuid

import uvloop

from common.errors import RefitError
from common.model_dir import base_model
from rollout_svc.config import RolloutConfig
from rollout_svc.replica import Replica
from rollout_svc.vllm_environment import set_engine_defaults


def main(config: RolloutConfig) -> int:
    """Exit status: 0 after SIGTERM or SIGINT, 1 after an error that is said in one line."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    try:
        uvloop.run(serve(config))
    except RefitError as error:
        print(f"rollout failed: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


async def serve(config: RolloutConfig) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: the model, the address or an engine argument cannot be used.
        EngineDead: the engine's process ended.
    """
    base = base_model(config.model)
    replica_id = uuid.uuid4().hex
    staging = config.staging_dir / replica_id
    staging.mkdir(parents=True)
    engine = None
    try:
        set_engine_defaults()
        from rollout_svc.vllm_engine import VllmEngine

        # Before the server, because gRPC must not be running when a process is started.
        engine = await VllmEngine.start(config)
        replica = Replica(config, engine, base=base, replica_id=replica_id, staging=staging)
        await replica.serve(_stop_signal())
    finally:
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)
        shutil.rmtree(staging, ignore_errors=True)


def _stop_signal() -> asyncio.Event:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    return stopped
