"""The merged model from real ranks to what a publisher takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.adapter import Dtype, Kind
from common.stream.verifier import Verifier
from trainer_svc.megatron.client import MegatronWorker
from trainer_svc.megatron.protocol import Batch
from trainer_svc.megatron.settings import WorkerSettings
from trainer_svc.sources import MegatronSource

DEADLINE_SECONDS = 120.0


@pytest.mark.timeout(240)
async def test_each_step_gives_another_merged_model(
    settings: WorkerSettings, batch: Batch, tmp_path: Path
) -> None:
    async with MegatronWorker(num_ranks=1, max_restarts=0) as worker:
        source = MegatronSource(
            worker,
            base_fingerprint="base",
            shm_dir=tmp_path,
            deadline_seconds=DEADLINE_SECONDS,
            dtype=Dtype.BFLOAT16,
            merged=True,
        )
        await worker.wait_connected(deadline_seconds=DEADLINE_SECONDS)
        await worker.init(settings, deadline_seconds=DEADLINE_SECONDS)
        before = await source.read()
        await worker.step(batch, deadline_seconds=DEADLINE_SECONDS)
        after = await source.read()
    for read in (before, after):
        assert read.manifest.kind is Kind.MERGED
        # The model's own type, not that of adapters.
        assert {spec.dtype for spec in read.manifest.tensors} == {Dtype.FLOAT32}
        Verifier(read.manifest).update(read.buffer)
    changed = {
        spec.name
        for spec, other in zip(before.manifest.tensors, after.manifest.tensors, strict=True)
        if spec.digest != other.digest
    }
    assert changed == {spec.name for spec in before.manifest.tensors if "_proj." in spec.name}
    assert list(tmp_path.iterdir()) == []
