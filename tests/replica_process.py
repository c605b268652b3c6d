"""A replica as a process of its own, real in all but its engine: `python -m tests.replica_process`.

For tests and benchmarks of the stream and the fleet, where vLLM's start would take most of the
time. Arguments are `KEY=VALUE` settings of `RolloutConfig`, those of `engine` are `SlowEngine`'s.
"""

from __future__ import annotations

import logging
import sys
import uuid

import uvloop

from common.config import load_config
from common.model_dir import base_model
from common.tasks import stop_requested
from rollout_svc.config import RolloutConfig
from rollout_svc.replica import Replica
from rollout_svc.updates.staging import staging_folder
from tests.slow_engine import SlowEngine


async def serve(config: RolloutConfig) -> None:
    stop = stop_requested()
    base, replica_id = base_model(config.model), uuid.uuid4().hex
    engine = SlowEngine(slots=config.max_loras, base_fingerprint=base.fingerprint, **config.engine)
    with staging_folder(config.staging_dir, replica_id) as staging:
        replica = Replica(config, engine, base=base, replica_id=replica_id, staging=staging)
        await replica.serve(stop)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    overrides = dict(argument.split("=", 1) for argument in sys.argv[1:])
    uvloop.run(serve(load_config(RolloutConfig, None, overrides)))


if __name__ == "__main__":
    main()
