"""The replica's side of `AdapterUpdate`: follows one trainer for as long as the process lives."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc
from refit.v1 import adapter_pb2, adapter_pb2_grpc

from common.errors import CorruptUpdate, InvalidField, NotHeld, RefitError
from common.stream.frames import Chunk, Event, Message, adapter_update, kind
from rollout_svc.updates.applier import UpdateApplier

log = logging.getLogger(__name__)

_FIRST_DELAY_SECONDS = 0.25
_LONGEST_DELAY_SECONDS = 10.0
_REFUSED_DELAY_SECONDS = 30.0
_CALL_SECONDS = 10.0
_SILENT_INTERVALS = 3
_RENEWALS_A_LEASE = 3
_LOST_SECONDS = 60.0
_FIRST_SILENCE_SECONDS = 60.0
"""Until the first heartbeat has told the interval."""

_LONGEST_INTERVAL_SECONDS = 3600.0
"""A heartbeat or a lease that claims more is not believed."""

_REFUSALS = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
}

Request = adapter_pb2.AdapterUpdateRequest


class PeerSilent(RefitError):
    """Three heartbeat intervals passed without a message."""


class ParentLost(RefitError):
    """The relay that bytes were to come from is gone."""


@dataclass(slots=True)
class BackOff:
    """Exponential delays with full jitter, in seconds."""

    _ceiling: float = _FIRST_DELAY_SECONDS

    def reset(self) -> None:
        self._ceiling = _FIRST_DELAY_SECONDS

    def next_seconds(self) -> float:
        seconds = random.uniform(0, self._ceiling)
        self._ceiling = min(2 * self._ceiling, _LONGEST_DELAY_SECONDS)
        return seconds


@dataclass(slots=True)
class Subscriber:
    """Subscribes, applies what comes, and subscribes again whenever a stream ends.

    The trainer's stream is always open; when it names a parent, the bytes come from there.

    Args:
        address: host:port of the trainer.
        subscription: makes the request anew each time, with the versions held by then.
        open_channel: makes the channel to an address.
    """

    address: str
    subscription: Callable[[], Request]
    open_channel: Callable[[str], grpc.aio.Channel]
    _channel: grpc.aio.Channel | None = None
    _stub: adapter_pb2_grpc.AdapterServiceStub | None = None
    _back_off: BackOff = field(default_factory=BackOff)
    _last_refusal: str = ""
    _lost_parents: dict[str, float] = field(default_factory=dict)
    """When each was lost, by the monotonic clock."""

    _asked_again: asyncio.Event = field(default_factory=asyncio.Event)
    _draining: str = ""
    """Why this replica drains; told again on every new stream, whose trainer would not know."""

    async def run(self, applier: UpdateApplier) -> None:
        """Follow the trainer until cancelled."""
        async with self.open_channel(self.address) as channel:
            self._channel, self._stub = channel, adapter_pb2_grpc.AdapterServiceStub(channel)
            try:
                # A task group that fails while it is being cancelled swallows the cancellation.
                while not _is_being_cancelled():
                    delay_seconds = await self._follow(applier)
                    await asyncio.sleep(delay_seconds)
            finally:
                applier.close()

    def resubscribe(self) -> None:
        """Subscribe anew: what was refused while nothing could be loaded comes again."""
        self._asked_again.set()

    async def report(self, request: adapter_pb2.ReportAdapterRequest) -> None:
        """Tell the trainer what became of an update."""
        request.replica_id = self.subscription().replica_id
        await self._trainer().ReportAdapter(request, timeout=_CALL_SECONDS)

    async def drain(self, reason: str) -> None:
        """Have the trainer send no more prompts; it may be gone, and then there are none."""
        self._draining = reason
        if self._stub is None:
            return
        request = adapter_pb2.RenewLeaseRequest(
            replica_id=self.subscription().replica_id, draining=True, reason=reason
        )
        try:
            await self._stub.RenewLease(request, timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.warning("trainer %s: no goodbye: %s", self.address, error.details())

    def _trainer(self) -> adapter_pb2_grpc.AdapterServiceStub:
        assert self._stub is not None, "run has begun"
        return self._stub

    async def _follow(self, applier: UpdateApplier) -> float:
        """One subscription; returns the seconds to wait before the next."""
        try:
            await self._session(applier)
            log.info("the subscription at trainer %s ended", self.address)
        except grpc.aio.AioRpcError as error:
            if error.code() in _REFUSALS:
                self._log_refusal(error)
                return _REFUSED_DELAY_SECONDS
            log.warning("trainer %s: %s %s", self.address, error.code().name, error.details())
        except (CorruptUpdate, InvalidField, NotHeld, PeerSilent, ParentLost) as error:
            log.warning("trainer %s: %s", self.address, error)
        finally:
            applier.suspend()
        return self._back_off.next_seconds()

    async def _session(self, applier: UpdateApplier) -> None:
        """Until the trainer ends its stream, or anything fails; the first error is raised."""
        self._asked_again.clear()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._end_when_asked())
                await self._read(group, applier)
                raise _Ended
        except BaseExceptionGroup as errors:
            error = _first(errors)
            if not isinstance(error, _Ended):
                raise error from None

    async def _end_when_asked(self) -> None:
        await self._asked_again.wait()
        raise _Ended

    async def _read(self, group: asyncio.TaskGroup, applier: UpdateApplier) -> None:
        """Apply the trainer's events; the tasks for lease and parent are the group's."""
        request = self._request(applier)
        leased = has_parent = False
        assert self._channel is not None, "run has begun"
        async with aclosing(_events(self._channel, request)) as events:
            async for event in events:
                if isinstance(event, Chunk):
                    await self._apply(event, applier)
                    continue
                match event.WhichOneof("event"):
                    case "heartbeat" if not leased and _is_sound(event.heartbeat.lease_seconds):
                        leased = True
                        group.create_task(self._renew(request, event.heartbeat.lease_seconds))
                    case "parent" if has_parent:
                        raise ParentLost("the trainer names another relay; subscribing again")
                    case "parent" if event.parent.address:
                        has_parent = True
                        group.create_task(self._read_parent(event.parent, request, applier))
                    case "heartbeat" | "parent":
                        pass
                    case _:
                        await self._apply(event, applier)

    def _request(self, applier: UpdateApplier) -> Request:
        request = self.subscription()
        oldest = time.monotonic() - _LOST_SECONDS
        self._lost_parents = {r: lost for r, lost in self._lost_parents.items() if lost > oldest}
        request.lost_parents.extend(self._lost_parents)
        if partial := applier.partial():
            request.partial.CopyFrom(partial)
        return request

    async def _apply(self, event: Message, applier: UpdateApplier) -> None:
        await applier.apply(event)
        self._last_refusal = ""
        # A manifest is no progress: what it begins may fail in the same way again and again.
        if kind(event) not in ("manifest", "tensors"):
            self._back_off.reset()

    async def _read_parent(
        self, parent: adapter_pb2.AdapterParent, request: Request, applier: UpdateApplier
    ) -> None:
        """Apply what a relay sends; raises `ParentLost` when that ends."""
        log.info("trainer %s: bytes come from relay %s", self.address, parent.address)
        request.run_id = parent.run_id
        try:
            async with (
                self.open_channel(parent.address) as channel,
                aclosing(_events(channel, request)) as events,
            ):
                async for event in events:
                    if kind(event) != "heartbeat":
                        await self._apply(event, applier)
            reason = "it ended the stream"
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name} {error.details()}"
        except PeerSilent as error:
            reason = str(error)
        self._lost_parents[parent.replica_id] = time.monotonic()
        raise ParentLost(f"relay {parent.replica_id} at {parent.address} is lost: {reason}")

    async def _renew(self, request: Request, lease_seconds: float) -> None:
        """Renew the lease for as long as the subscription is open."""
        if self._draining:
            await self.drain(self._draining)
        renewal = adapter_pb2.RenewLeaseRequest(replica_id=request.replica_id)
        while True:
            await asyncio.sleep(lease_seconds / _RENEWALS_A_LEASE)
            response = await self._trainer().RenewLease(renewal, timeout=lease_seconds)
            if _is_sound(response.lease_seconds):
                lease_seconds = response.lease_seconds

    def _log_refusal(self, error: grpc.aio.AioRpcError) -> None:
        if error.details() != self._last_refusal:
            self._last_refusal = error.details() or ""
            log.error("trainer %s refuses this replica: %s", self.address, error.details())


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _is_sound(seconds: float) -> bool:
    return 0 < seconds <= _LONGEST_INTERVAL_SECONDS


class _Ended(Exception):
    """The trainer ended the stream in order, or this replica wants a new one."""


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


async def _events(channel: grpc.aio.Channel, request: Request) -> AsyncGenerator[Message]:
    """The events of a subscription until it ends; raises `PeerSilent`."""
    silence_seconds = _FIRST_SILENCE_SECONDS
    call = adapter_update(channel)(request)
    try:
        while True:
            try:
                async with asyncio.timeout(silence_seconds):
                    event: Message = await call.read()
            except TimeoutError as error:
                raise PeerSilent(
                    f"no heartbeat for {silence_seconds:.1f} s; subscribing again"
                ) from error
            if isinstance(event, Event) and _is_sound(event.heartbeat.interval_seconds):
                silence_seconds = _SILENT_INTERVALS * event.heartbeat.interval_seconds
            elif not isinstance(event, Event | Chunk):
                return
            yield event
    finally:
        call.cancel()
