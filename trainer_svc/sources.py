"""Where adapters come from: the seam between whatever trains and the publisher."""

from __future__ import annotations

import asyncio
import mmap
import uuid
from pathlib import Path
from typing import Protocol

from common.adapter import Dtype
from common.peft_checks import check_served
from common.peft_dir import CONFIG_FILE, PeftAdapter, read_peft_dir
from trainer_svc.megatron.client import MegatronWorker


class AdapterSource(Protocol):
    """Anything that can give an adapter's content as it is now."""

    async def read(self) -> PeftAdapter:
        """The manifest and the flat buffer, which nothing writes to afterwards."""


class PeftDirSource:
    """A PEFT directory on disk; reading one that replicas cannot serve is a `ConfigError`.

    Args:
        dora: replicas may sum it into their weights, so that DoRA can be served.
    """

    def __init__(self, path: Path, *, base_fingerprint: str, dora: bool = False) -> None:
        self._path = path
        self._base_fingerprint = base_fingerprint
        self._dora = dora

    async def read(self) -> PeftAdapter:
        adapter = await asyncio.to_thread(
            read_peft_dir, self._path, base_fingerprint=self._base_fingerprint
        )
        if adapter.manifest.lora:
            check_served(self._path / CONFIG_FILE, adapter.manifest.lora, dora=self._dora)
        return adapter


class MegatronSource:
    """A policy of the ranks, through shared memory; whole and merged with `merged`."""

    def __init__(
        self,
        worker: MegatronWorker,
        *,
        base_fingerprint: str,
        shm_dir: Path,
        deadline_seconds: float,
        dtype: Dtype,
        adapter: str = "default",
        merged: bool = False,
    ) -> None:
        self._worker = worker
        self._adapter, self._merged = adapter, merged
        self._dtype = dtype
        self._deadline_seconds = deadline_seconds
        self._base_fingerprint = base_fingerprint
        self._shm_dir = shm_dir

    async def read(self) -> PeftAdapter:
        """The ranks write the flat buffer; here its pages are mapped, never copied.

        The name goes at once, so that the memory is the mapping's and is freed with it.
        """
        path = self._shm_dir / f"refit-{uuid.uuid4().hex}"
        try:
            manifest = await self._worker.export(
                path,
                base_fingerprint=self._base_fingerprint,
                deadline_seconds=self._deadline_seconds,
                dtype=self._dtype,
                adapter=self._adapter,
                merged=self._merged,
            )
            with path.open("rb") as file:
                pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        finally:
            path.unlink(missing_ok=True)
        return PeftAdapter(manifest, memoryview(pages))
