"""The replica's side of `AdapterUpdate`: follows one trainer for as long as the process lives."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from refit.v1 import adapter_pb2, adapter_pb2_grpc

from common.errors import CorruptUpdate, InvalidField, RefitError
from common.grpc_server import connect
from rollout_svc.updates import UpdateApplier

log = logging.getLogger(__name__)

_FIRST_DELAY_SECONDS = 0.25
_LONGEST_DELAY_SECONDS = 10.0
_REFUSED_DELAY_SECONDS = 30.0
_REPORT_SECONDS = 10.0
_SILENT_INTERVALS = 3
# Until the trainer's first heartbeat has told its interval.
_FIRST_SILENCE_SECONDS = 60.0
_REFUSALS = {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT}


class TrainerSilent(RefitError):
    """Three heartbeat intervals passed without a message."""


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


class Subscriber:
    """Subscribes, applies what comes, and subscribes again whenever the stream ends.

    Args:
        address: host:port of the trainer.
        subscription: makes the request anew each time, with the versions held by then.
    """

    def __init__(
        self,
        address: str,
        *,
        subscription: Callable[[], adapter_pb2.AdapterUpdateRequest],
    ) -> None:
        self._address = address
        self._subscription = subscription
        self._back_off = BackOff()
        self._last_refusal = ""
        self._channel = connect(address)
        self._stub = adapter_pb2_grpc.AdapterServiceStub(self._channel)

    async def run(self, applier: UpdateApplier) -> None:
        """Follow the trainer until cancelled."""
        try:
            while True:
                delay_seconds = await self._follow(applier)
                await asyncio.sleep(delay_seconds)
        finally:
            await self._channel.close()

    async def report(self, request: adapter_pb2.ReportAdapterRequest) -> None:
        """Tell the trainer what became of an update."""
        request.replica_id = self._subscription().replica_id
        await self._stub.ReportAdapter(request, timeout=_REPORT_SECONDS)

    async def _follow(self, applier: UpdateApplier) -> float:
        """One subscription; returns the seconds to wait before the next."""
        try:
            await self._read(applier)
            log.info("trainer %s ended the subscription", self._address)
        except grpc.aio.AioRpcError as error:
            if error.code() in _REFUSALS:
                self._log_refusal(error)
                return _REFUSED_DELAY_SECONDS
            log.warning("trainer %s: %s %s", self._address, error.code().name, error.details())
        except (CorruptUpdate, InvalidField, TrainerSilent) as error:
            log.warning("trainer %s: %s", self._address, error)
        finally:
            applier.abandon()
        return self._back_off.next_seconds()

    async def _read(self, applier: UpdateApplier) -> None:
        silence_seconds = _FIRST_SILENCE_SECONDS
        call = self._stub.AdapterUpdate(self._subscription())
        try:
            while (event := await _next(call, silence_seconds)) is not None:
                if event.WhichOneof("event") != "heartbeat":
                    await applier.apply(event)
                elif event.heartbeat.interval_seconds > 0:
                    silence_seconds = _SILENT_INTERVALS * event.heartbeat.interval_seconds
                # Not before: an event that cannot be applied must not come again at once.
                self._back_off.reset()
                self._last_refusal = ""
        finally:
            call.cancel()

    def _log_refusal(self, error: grpc.aio.AioRpcError) -> None:
        if error.details() != self._last_refusal:
            self._last_refusal = error.details() or ""
            log.error("trainer %s refuses this replica: %s", self._address, error.details())


async def _next(
    call: grpc.aio.UnaryStreamCall[
        adapter_pb2.AdapterUpdateRequest, adapter_pb2.AdapterUpdateResponse
    ],
    silence_seconds: float,
) -> adapter_pb2.AdapterUpdateResponse | None:
    """The next event, or None at the end of the stream; raises `TrainerSilent`."""
    try:
        async with asyncio.timeout(silence_seconds):
            event = await call.read()
    except TimeoutError as error:
        raise TrainerSilent(
            f"no heartbeat for {silence_seconds:.1f} s; subscribing again"
        ) from error
    return event if isinstance(event, adapter_pb2.AdapterUpdateResponse) else None
