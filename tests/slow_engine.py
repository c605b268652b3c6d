"""An engine without a model that takes its time, and looks at the adapters it is given."""

from __future__ import annotations

import asyncio

from common.errors import Incompatible
from common.peft_dir import read_peft_dir
from rollout_svc.engine import BoundReport, EngineAdapter
from tests.fake_engine import FakeEngine


class SlowEngine(FakeEngine):
    """A `FakeEngine` that says on standard output what it begins to load, and reads it.

    Args:
        load_seconds: how long a load takes.
        token_seconds: how long each token takes.
    """

    def __init__(
        self,
        *,
        slots: int,
        base_fingerprint: str,
        load_seconds: float = 0.0,
        token_seconds: float = 0.0,
    ) -> None:
        super().__init__(slots=slots)
        self._base_fingerprint = base_fingerprint
        self._load_seconds, self._token_seconds = load_seconds, token_seconds

    async def load(self, adapter: EngineAdapter, *, in_place: bool = False) -> list[BoundReport]:
        """Raises `Incompatible` where the directory is not what the name's digest says."""
        print(f"loading {adapter.name}", flush=True)
        await asyncio.sleep(self._load_seconds)
        found = read_peft_dir(adapter.path, base_fingerprint=self._base_fingerprint)
        digest = found.manifest.digest().hex()
        if not digest.startswith(adapter.name.split("-")[-2]):
            raise Incompatible(f"adapter {adapter.name}: {digest} lies in its directory")
        return await super().load(adapter, in_place=in_place)

    async def pause(self) -> None:
        await super().pause()
        self.gate.clear()

    async def resume(self) -> None:
        await super().resume()
        self.gate.set()

    async def _step(self, aborted: asyncio.Event) -> None:
        await asyncio.sleep(self._token_seconds)
        await super()._step(aborted)
