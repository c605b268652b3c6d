"""The fleet of a run: what its replicas serve, and which one takes a prompt."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator

import grpc
from refit.v1 import adapter_pb2, trainer_pb2

from common.adapter import Manifest
from common.errors import WaitExpired
from common.grpc_server import connect
from common.model_dir import BaseModel
from common.rules import Rules
from common.wire import ref_from_proto
from trainer_svc.fleet.admission import Needed
from trainer_svc.fleet.members import Members
from trainer_svc.fleet.replica import Quarantine, Replica, State
from trainer_svc.fleet.reports import take_report
from trainer_svc.publisher import Publisher

log = logging.getLogger(__name__)

_MAX_FAILURES = 3
_QUARANTINE_SECONDS = 30.0


class Fleet:
    """Its `members` come and go by subscription; prompts go to the least busy of them.

    Args:
        fan_out: streams that the trainer and each relay carry at most; 0 for no limit.
        open_channel: makes the channel to a replica's address.
    """

    def __init__(
        self,
        base: BaseModel,
        publisher: Publisher,
        *,
        fan_out: int = 0,
        open_channel: Callable[[str], grpc.aio.Channel] = connect,
    ) -> None:
        self.max_staleness = 0
        """Versions that a replica may be behind and still be ready."""

        self.members = Members(base, publisher, fan_out=fan_out, open_channel=open_channel)
        self._publisher = publisher
        self._changed = self.members.changed

    @property
    def replicas(self) -> list[Replica]:
        return list(self.members)

    def state(self, replica: Replica) -> State:
        newest = {ref.adapter: ref.version for ref in self._publisher.refs()}
        return replica.state(newest, max_staleness=self.max_staleness)

    def require(
        self,
        manifest: Manifest,
        *,
        rules: Rules = Rules(),  # noqa: B008 - frozen
        adapters: Iterable[str] = (),
    ) -> None:
        """From now on, replicas that cannot serve a version like this one are refused.

        Args:
            rules: what will go with it.
            adapters: all that the run will publish, beside those that it has published.
        """
        self.members.needed = Needed(manifest, rules, frozenset(adapters))

    def report(self, request: adapter_pb2.ReportAdapterRequest) -> None:
        """Take a replica's word on an update.

        Raises:
            ReplicaNotFound: it has no open subscription.
            InvalidField: a field is malformed, or it committed what was never published.
            CorruptUpdate: it committed other bytes than were published.
        """
        replica = self.members[request.replica_id]
        held = frozenset(map(ref_from_proto, request.held))
        take_report(request, replica=replica, publisher=self._publisher)
        self.members.holds(replica, held)

    def answered(self, replica: Replica) -> None:
        """It gave a whole, right answer."""
        replica.line.failures_in_a_row = 0

    def failed(self, replica: Replica, reason: str) -> None:
        """It did not answer; after the third time in a row it gets no prompts for a while."""
        line = replica.line
        line.failures_in_a_row += 1
        if line.failures_in_a_row >= _MAX_FAILURES:
            why = f"failed {line.failures_in_a_row} prompts in a row, the last by: {reason}"
            why += f"; for {_QUARANTINE_SECONDS:g} s"
            self._quarantine(replica, why, seconds=_QUARANTINE_SECONDS)
            line.failures_in_a_row = 0

    def quarantine(self, replica: Replica, reason: str) -> None:
        """No prompts until it commits a newer version of an adapter that it serves."""
        self._quarantine(replica, reason)

    def _quarantine(self, replica: Replica, reason: str, *, seconds: float | None = None) -> None:
        newest = {name: replica.newest(name) for name, _ in replica.committed}
        # It may have subscribed anew since it was asked.
        replica = self.members.now(replica)
        if replica.is_quarantined(for_good=True):
            return
        replica.quarantine = quarantine = Quarantine(reason, newest, timed=seconds is not None)
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, self._release, quarantine)
        log.error("replica %s in quarantine: %s", replica.id, reason)
        self._changed.notify()

    def _release(self, quarantine: Quarantine) -> None:
        quarantine.over = True
        self._changed.notify()

    async def wait_for(
        self,
        adapter: str,
        version: int,
        *,
        replicas: int,
        timeout_seconds: float,
        straggler_seconds: float,
    ) -> list[Replica]:
        """Wait until so many serve the version and take prompts, then a little for the others.

        A replica that refused the version, never wanted the adapter, drains or left, is not
        waited for.

        Raises:
            WaitExpired: fewer have it when the time is over; each one's state is named.
        """

        def enough() -> bool:
            return len(self._ready(adapter, version)) >= replicas

        def settled() -> bool:
            serving = self._serving(adapter, version)
            return all(
                r in serving
                or r.refused(adapter, version)
                or r.draining
                or not r.subscription.wants(adapter)
                for r in self.replicas
            )

        now = asyncio.get_running_loop().time
        deadline = now() + timeout_seconds
        while await self._changed.wait_until(enough, timeout_seconds=deadline - now()):
            await self._changed.wait_until(settled, timeout_seconds=straggler_seconds)
            # One may have left while the others were waited for.
            if enough():
                return self._ready(adapter, version)
        raise WaitExpired(self._why_not(adapter, version, replicas))

    def _serving(self, adapter: str, version: int) -> list[Replica]:
        return [replica for replica in self.replicas if replica.serves(adapter, version)]

    def _why_not(self, adapter: str, version: int, needed: int) -> str:
        states = [
            f"{r.id}: {trainer_pb2.ReplicaState.Name(state)} ({reason})"
            for r in self.replicas
            for state, reason in [self.state(r)]
        ]
        states += [
            f"{address}: refused ({reason})" for address, reason in self.members.refused.items()
        ]
        return (
            f"{adapter}@{version}: {needed} replicas must serve it, "
            f"{len(self._ready(adapter, version))} do; "
            f"{'; '.join(states) or 'none is subscribed, start `refit rollout`'}"
        )

    async def wait_for_any(
        self, adapter: str, version: int, *, avoid: frozenset[str], timeout_seconds: float
    ) -> bool:
        """Whether, in time, a replica outside `avoid` serves the version and takes prompts."""
        return await self._changed.wait_until(
            lambda: bool(self._ready(adapter, version, avoid)), timeout_seconds=timeout_seconds
        )

    @contextlib.contextmanager
    def leased(self, adapter: str, version: int, *, avoid: frozenset[str]) -> Iterator[Replica]:
        """The least busy replica that serves the version, counted as busier while in use."""
        replica = min(self._ready(adapter, version, avoid), key=lambda r: r.outstanding)
        replica.line.outstanding += 1
        try:
            yield replica
        finally:
            replica.line.outstanding -= 1

    def _ready(
        self, adapter: str, version: int, avoid: frozenset[str] = frozenset()
    ) -> list[Replica]:
        serving = self._serving(adapter, version)
        return [r for r in serving if r.takes_prompts(adapter) and r.id not in avoid]

    async def close(self) -> None:
        """End every membership; cut the lines of replicas that still have work."""
        await self.members.close()
