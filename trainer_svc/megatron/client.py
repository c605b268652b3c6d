"""The service's end of the Megatron ranks: a method for each command; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.adapter import Dtype, Manifest
from trainer_svc.megatron.protocol import Batch, Json, manifest_from_json
from trainer_svc.megatron.ranks import Ranks
from trainer_svc.megatron.settings import WorkerSettings


class MegatronWorker(Ranks):
    """The policy under training, in the ranks of one machine.

    async with MegatronWorker(num_ranks=1, max_restarts=3) as worker:
        await worker.init(settings, deadline_seconds=300)
        metrics = await worker.step(batch, deadline_seconds=600)
    """

    async def init(self, settings: WorkerSettings, *, deadline_seconds: float) -> None:
        """Build model, adapter and optimizer; drops what the ranks held.

        Raises:
            ConfigError, Incompatible: the settings do not fit the model, adapter or ranks.
        """
        args = {"settings": settings.model_dump(mode="json")}
        await self.call("init", args, deadline_seconds=deadline_seconds)

    async def step(self, batch: Batch, *, deadline_seconds: float) -> dict[str, float]:
        """One policy update; its metrics (see `MegatronTrainer.step`)."""
        args = {"batch": batch.to_json()}
        return await self.call("step", args, deadline_seconds=deadline_seconds)

    async def logprobs(self, batch: Batch, *, deadline_seconds: float) -> list[list[float]]:
        """Log-probability of every completion token under the trainer's policy."""
        args = {"batch": batch.to_json()}
        reply = await self.call("logprobs", args, deadline_seconds=deadline_seconds)
        values: list[list[float]] = reply["logprobs"]
        return values

    async def export(
        self,
        path: Path,
        *,
        base_fingerprint: str,
        deadline_seconds: float,
        dtype: Dtype | None = None,
        adapter: str = "default",
        merged: bool = False,
    ) -> Manifest:
        """Have the adapter's flat buffer written to `path`; None keeps the adapter's own type.

        With `merged` it is the whole model's, the adapter in its weights and in their type.

        Raises:
            StagingFull: no room for it.
        """
        args = {
            "path": str(path),
            "base_fingerprint": base_fingerprint,
            "dtype": dtype.value if dtype else None,
            "adapter": adapter,
            "merged": merged,
        }
        reply = await self.call("export", args, deadline_seconds=deadline_seconds)
        return manifest_from_json(reply["manifest"])

    async def add_adapter(self, name: str, *, deadline_seconds: float) -> None:
        """Add an adapter that is a copy of the one that trains.

        Raises:
            AlreadyExists: the name is taken.
        """
        await self.call("add_adapter", {"name": name}, deadline_seconds=deadline_seconds)

    async def ema_update_adapter(
        self, *, target: str, decay: float, deadline_seconds: float
    ) -> None:
        """target = decay * target + (1 - decay) * the adapter that trains.

        Raises:
            AdapterNotFound, InvalidField: there is no such adapter, or `decay` is not in [0, 1].
        """
        args = {"target": target, "decay": decay}
        await self.call("ema_update_adapter", args, deadline_seconds=deadline_seconds)

    async def save(self, path: Path, *, state: Mapping[str, Any], deadline_seconds: float) -> None:
        """Write a checkpoint directory, whole or not at all; `state` is plain JSON values.

        Raises:
            CheckpointFailed: a rank could not write; what lay under `path` still does.
        """
        args = {"path": str(path), "state": dict(state)}
        await self.call("save", args, deadline_seconds=deadline_seconds)

    async def load(self, path: Path, *, deadline_seconds: float) -> Json:
        """Go on from a checkpoint; the `state` it was saved with.

        Raises:
            ConfigError: no whole checkpoint lies there.
            Incompatible: its adapter is not that of the settings.
        """
        reply = await self.call("load", {"path": str(path)}, deadline_seconds=deadline_seconds)
        state: Json = reply["state"]
        return state
