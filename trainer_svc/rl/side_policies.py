"""`old` and `reference`, published beside the policy that trains, so that replicas serve all."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from common.rules import Rules
from trainer_svc.megatron.client import MegatronWorker
from trainer_svc.node import Node
from trainer_svc.rl.settings import OldPolicySettings
from trainer_svc.sources import AdapterSource

log = logging.getLogger(__name__)

OLD = "old"
REFERENCE = "reference"


class SidePolicies:
    """What a run publishes beside its policy, by name; `sources` has those that it shall.

    `old` follows the policy: a copy at the start, later an average that `old_policy` describes.
    """

    def __init__(
        self,
        old_policy: OldPolicySettings | None,
        *,
        sources: Mapping[str, AdapterSource],
        worker: MegatronWorker,
        node: Node,
        rules: Rules,
        deadline_seconds: float,
    ) -> None:
        self._old = old_policy
        self._sources, self._worker = sources, worker
        self._node, self._rules = node, rules
        self._deadline_seconds = deadline_seconds

    async def add(self) -> None:
        """Make `old` on fresh ranks; a checkpoint that has it is loaded afterwards."""
        if self._old:
            await self._worker.add_adapter(OLD, deadline_seconds=self._deadline_seconds)

    async def publish(self, *, version: int) -> None:
        """Publish each of them as it is, under the policy's own number."""
        for name in self._sources:
            await self._publish(name, version=version)

    async def after_step(self, step: int, *, version: int) -> None:
        """Let `old` follow where it is due, and publish it under the number of that policy."""
        if self._old is None or step % self._old.interval:
            return
        await self._worker.ema_update_adapter(
            target=OLD, decay=self._old.decay, deadline_seconds=self._deadline_seconds
        )
        await self._publish(OLD, version=version)

    async def _publish(self, name: str, *, version: int) -> None:
        adapter = await self._sources[name].read()
        ref = self._node.publisher.publish(
            name, adapter.manifest, adapter.buffer, version=version, rules=self._rules
        )
        log.info("published %s", ref)
