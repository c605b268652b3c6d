from __future__ import annotations

import asyncio
import logging
import time

import pytest

from common.errors import AlreadyExists, QueueFull, Unavailable, WaitExpired
from rollout_svc.generation import requests as requests_module
from rollout_svc.generation.requests import RunningRequests


class Aborts:
    """An engine's `abort` that ends the request, as far as it does anything."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.ended = asyncio.Event()

    async def __call__(self, request_id: str) -> None:
        self.asked.append(request_id)
        self.ended.set()


async def never(request_id: str) -> None:
    await asyncio.Event().wait()


async def run_until(requests: RunningRequests, request_id: str, ended: asyncio.Event) -> None:
    with requests.running(request_id):
        await ended.wait()


async def test_an_id_runs_once_at_a_time_and_is_free_afterwards() -> None:
    requests = RunningRequests(abort=never, max_requests=2)
    with requests.running("one"):
        with pytest.raises(AlreadyExists, match="'one' is running"), requests.running("one"):
            pass
        with requests.running("two"):
            pass
    with requests.running("one"):
        pass


async def test_a_full_queue_says_what_to_do_and_empties() -> None:
    requests = RunningRequests(abort=never, max_requests=1)
    with (
        requests.running("one"),
        pytest.raises(QueueFull, match=r"max_requests: 1 requests .* or raise the limit"),
        requests.running("two"),
    ):
        pass
    with requests.running("two"):
        pass


async def test_a_drain_of_nothing_returns_at_once() -> None:
    await RunningRequests(abort=never, max_requests=1).drain(0)


async def test_a_drain_aborts_nothing_that_ends_within_the_grace() -> None:
    aborts, ended = Aborts(), asyncio.Event()
    requests = RunningRequests(abort=aborts, max_requests=1)
    running = asyncio.create_task(run_until(requests, "one", ended))
    await asyncio.sleep(0)
    draining = asyncio.create_task(requests.drain(5))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="shutting down"), requests.running("two"):
        pass
    assert not draining.done()
    ended.set()
    await asyncio.gather(running, draining)
    assert aborts.asked == []


async def test_a_drain_aborts_what_outlasts_the_grace_and_waits_for_its_end() -> None:
    aborts = Aborts()
    requests = RunningRequests(abort=aborts, max_requests=2)
    running = [asyncio.create_task(run_until(requests, name, aborts.ended)) for name in "ab"]
    await asyncio.sleep(0)
    await requests.drain(0)
    assert sorted(aborts.asked) == ["a", "b"]
    await asyncio.gather(*running)


@pytest.mark.parametrize("abort_hangs", [True, False])
async def test_a_drain_ends_though_the_engine_reacts_to_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, abort_hangs: bool
) -> None:
    """faults.md 23: every wait has a deadline."""
    monkeypatch.setattr(requests_module, "_ABORT_SECONDS", 0.05)
    requests = RunningRequests(abort=never if abort_hangs else Aborts(), max_requests=1)
    running = asyncio.create_task(run_until(requests, "one", asyncio.Event()))
    await asyncio.sleep(0)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        await requests.drain(0.05)
    assert 0.1 <= time.monotonic() - began < 2
    assert caplog.messages == ["1 requests did not end when asked to; they are cut off"]
    running.cancel()


async def test_what_waits_for_admission_ends_with_the_grace() -> None:
    requests = RunningRequests(abort=Aborts(), max_requests=1)

    async def wait() -> None:
        with requests.running("one"):
            async with requests.admission():
                await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    await requests.drain(0)
    with pytest.raises(Unavailable, match="shutting down"):
        await waiting
    with pytest.raises(Unavailable, match="shutting down"):
        async with requests.admission():
            pass


async def test_admission_leaves_other_errors_and_cancellation_as_they_are() -> None:
    requests = RunningRequests(abort=never, max_requests=1)
    with pytest.raises(WaitExpired, match="version 9"):
        async with requests.admission():
            raise WaitExpired("version 9")

    async def wait() -> None:
        async with requests.admission():
            await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
