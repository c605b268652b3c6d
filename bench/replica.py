"""`python -m bench.replica TRAINER STAGING`: a replica process that is real but for its engine."""

from __future__ import annotations

import asyncio
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import uvloop

from bench.shapes import BASE_FINGERPRINT, PROJECTIONS
from common.model_dir import BaseModel
from common.tasks import stop_requested
from rollout_svc.config import RolloutConfig
from rollout_svc.engine import Capabilities
from rollout_svc.replica import Replica
from rollout_svc.updates.staging import staging_folder
from tests.fake_engine import FakeEngine


class RoomyEngine(FakeEngine):
    """Takes adapters of every benchmark's shape."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, max_rank=512, target_modules=PROJECTIONS)


async def serve(trainer: str, staging_dir: Path) -> None:
    stop = stop_requested()
    replica_id = uuid.uuid4().hex
    config = RolloutConfig(
        model=Path(), trainer_address=trainer, staging_dir=staging_dir, keep_versions=1, max_loras=2
    )
    with staging_folder(staging_dir, replica_id) as staging:
        replica = Replica(
            config,
            RoomyEngine(slots=config.max_loras),
            base=BaseModel("bench", BASE_FINGERPRINT),
            replica_id=replica_id,
            staging=staging,
        )
        await replica.serve(stop)


if __name__ == "__main__":
    uvloop.install()
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2])))
