"""Who is here, whose lease runs, who was lost."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest
from refit.v1 import adapter_pb2

from common.errors import (
    AlreadyExists,
    Incompatible,
    InvalidField,
    ReplicaNotFound,
    Unavailable,
)
from common.model_dir import BaseModel
from common.stream.sender import Pace
from tests.eventually import eventually
from tests.subscriptions import Run, committed, refused, subscription_request
from trainer_svc.fleet import Fleet, lines
from trainer_svc.publisher import Publisher
from trainer_svc.subscription import Parent


def _renewal(*, draining: bool = False) -> adapter_pb2.RenewLeaseRequest:
    return adapter_pb2.RenewLeaseRequest(
        replica_id="r1", draining=draining, reason="SIGTERM" if draining else ""
    )


def _lost(run: Run) -> list[tuple[str, str]]:
    return [(lost.id, lost.reason) for lost in run.fleet.members.lost]


async def test_before_the_first_adapter_a_subscriber_is_asked_to_come_again(run: Run) -> None:
    with pytest.raises(Unavailable), run.fleet.members.joined(subscription_request()):
        pass
    run.publish(1)
    with run.fleet.members.joined(subscription_request()) as replica:
        assert run.fleet.replicas == [replica]
    assert run.fleet.replicas == []
    assert _lost(run) == [("r1", "its subscription ended")]


async def test_a_replica_that_merges_is_refused_where_it_would_get_several_adapters(
    run: Run,
) -> None:
    """What the run has published counts, beside what it says that it will publish."""
    request = subscription_request()
    request.capabilities.merge = adapter_pb2.MERGE_RULE_ROLLOUT
    request.capabilities.merging.target_modules.extend(["q_proj", "k_proj"])
    run.publish(1)
    with run.fleet.members.joined(request):
        pass
    run.publish(2, adapter="task")
    with (
        pytest.raises(Incompatible, match="serves one, the run publishes default, task"),
        run.fleet.members.joined(request),
    ):
        pass
    assert list(run.fleet.members.refused) == ["r1:1"]


async def test_an_id_that_another_address_uses_is_refused(run: Run) -> None:
    run.publish(1)
    other = subscription_request()
    other.advertised_address = "elsewhere:1"
    with run.fleet.members.joined(subscription_request()) as replica:
        with pytest.raises(AlreadyExists, match="'r1' is subscribed from r1:1"):
            run.fleet.members.joined(other).__enter__()
        assert run.fleet.replicas == [replica]
    with run.fleet.members.joined(other) as replica:
        assert run.fleet.replicas == [replica]


async def test_a_replica_whose_connection_broke_takes_its_place_over(run: Run) -> None:
    """faults.md 23, TRL#6797: the half-open stream that it left behind ends, and does no harm."""
    held = run.publish(1)
    request = subscription_request(held=[held])
    with contextlib.ExitStack() as late:
        broken = late.enter_context(run.fleet.members.joined(request))
        events = run.publisher.subscribe(broken.subscription)
        await anext(events)
        with run.fleet.members.joined(request) as replica:
            with pytest.raises(Unavailable, match="it subscribed anew"):
                await anext(events)
            assert run.fleet.replicas == [replica]
            assert _lost(run) == []
            assert list(replica.committed.values()) == [held]
            # The old handler ends late, and takes nothing with it.
            late.close()
            assert run.fleet.replicas == [replica]


async def test_a_malformed_request_does_not_end_the_one_who_is_here(run: Run) -> None:
    run.publish(1)
    malformed = subscription_request()
    malformed.held.add()
    with run.fleet.members.joined(subscription_request()) as replica:
        with pytest.raises(InvalidField):
            run.fleet.members.joined(malformed).__enter__()
        assert run.fleet.replicas == [replica]
        assert not replica.subscription.ended


async def test_a_quarantine_is_not_left_by_subscribing_again(run: Run) -> None:
    """faults.md 6, miles#1724: no prompts for a replica only because it came back."""
    first, second = run.publish(1), run.publish(2)
    request = subscription_request(held=[first])
    with run.fleet.members.joined(request):
        run.fleet.report(refused("r1", second, first))
    with run.fleet.members.joined(request) as replica:
        assert not replica.takes_prompts("default")
        assert replica.refused("default", 2)
        run.fleet.report(committed("r1", first, second))
        assert replica.takes_prompts("default")


async def test_a_relay_that_takes_its_place_over_is_not_its_own_parent() -> None:
    publisher = Publisher("run", keep=2, pace=Pace())
    fleet = Fleet(BaseModel("m", "base"), publisher, fan_out=1)
    Run(fleet, publisher).publish(1)
    relay = subscription_request(relay=True)
    with fleet.members.joined(relay), fleet.members.joined(subscription_request("child")) as child:
        assert child.subscription.parent == Parent("r1", "r1:1")
        with fleet.members.joined(relay) as replica:
            assert replica.subscription.parent is None
    await fleet.close()


async def test_only_versions_of_this_run_count_as_served(run: Run) -> None:
    kept = run.publish(1)
    other = type(kept)("other", "default", 9, kept.digest)
    with run.fleet.members.joined(subscription_request(held=[kept, other])) as replica:
        assert replica.committed == {("default", 1): kept}
        assert replica.subscription.held == {kept, other}


async def test_a_silent_replica_leaves_the_fleet_and_its_stream_ends(run: Run) -> None:
    """faults.md 23, prime-rl#2230: one that dies without a word is gone within its lease."""
    run.publish(1)
    loop = asyncio.get_running_loop()
    with run.fleet.members.joined(subscription_request()) as replica:
        begun = loop.time()
        await asyncio.sleep(0.1)
        assert run.fleet.members.renew(_renewal()) == 0.2
        renewed = loop.time()
        with pytest.raises(Unavailable, match=r"silent for 0.2 s, its lease; subscribe again"):
            async for _ in run.publisher.subscribe(replica.subscription):
                pass
        assert loop.time() - begun >= 0.3
        assert loop.time() - renewed < 1
        assert run.fleet.replicas == []
        assert _lost(run) == [("r1", "it was silent for 0.2 s, its lease")]
        with pytest.raises(ReplicaNotFound, match="'r1' is not subscribed"):
            run.fleet.members.renew(_renewal())


async def test_a_replica_that_takes_no_bytes_leaves_the_fleet(run: Run) -> None:
    """faults.md 23: it renews its lease, and holds its update in the trainer's memory for ever."""
    run.publish(1)
    with run.fleet.members.joined(subscription_request()) as replica:
        events = run.publisher.subscribe(replica.subscription)
        await anext(events)
        await asyncio.sleep(0.15)
        with pytest.raises(ReplicaNotFound, match="'r1' took no bytes"):
            run.fleet.members.renew(_renewal())
        assert _lost(run) == [("r1", "it took no bytes for 0.1 s")]
        with pytest.raises(Unavailable):
            await anext(events)


async def test_a_draining_replica_gets_no_prompt_and_is_not_lost(run: Run) -> None:
    held = run.publish(1)
    with run.fleet.members.joined(subscription_request(held=[held])) as replica:
        assert replica.takes_prompts("default")
        run.fleet.members.renew(_renewal(draining=True))
        run.fleet.members.renew(_renewal())
        assert replica.draining == "SIGTERM"
        assert not replica.takes_prompts("default")
    assert _lost(run) == []


async def test_a_lost_replica_is_lost_no_more_when_it_comes_back(run: Run) -> None:
    run.publish(1)
    for name in ("r1", "r2"):
        with run.fleet.members.joined(subscription_request(name)):
            pass
    with run.fleet.members.joined(subscription_request("r1")):
        assert [name for name, _ in _lost(run)] == ["r2"]


async def test_close_leaves_nothing_running(run: Run) -> None:
    run.publish(1)
    with run.fleet.members.joined(subscription_request()) as replica:
        await run.fleet.close()
        assert run.fleet.replicas == []
        assert replica.timer is not None
        assert replica.timer.cancelled()
    await eventually(lambda: len(asyncio.all_tasks()) == 1)


async def test_a_refusal_is_not_carried_over_to_one_who_holds_a_newer_version(run: Run) -> None:
    """faults.md 23: the report of the commit was lost with the connection."""
    first, second = run.publish(1), run.publish(2)
    with run.fleet.members.joined(subscription_request(held=[first])) as replica:
        run.fleet.quarantine(replica, "answered with the base model")
        run.fleet.report(refused("r1", second, first))
    third = run.publish(3)
    with run.fleet.members.joined(subscription_request(held=[third])) as replica:
        assert replica.takes_prompts("default")
        assert replica.refusal is None


@pytest.mark.parametrize("live", [True, False])
async def test_the_work_of_a_replica_whose_stream_broke_goes_on(run: Run, live: bool) -> None:
    """faults.md 23, prime-rl#2230: neither cut, nor forgotten, nor sent to one that drains."""
    ref = run.publish(1)
    request = subscription_request(held=[ref])
    with contextlib.ExitStack() as first, contextlib.ExitStack() as work:
        before = first.enter_context(run.fleet.members.joined(request))
        for _ in range(2):
            run.fleet.failed(before, "UNAVAILABLE")
        work.enter_context(run.fleet.leased("default", 1, avoid=frozenset()))
        run.fleet.members.renew(_renewal(draining=True))
        if not live:
            first.close()
        with run.fleet.members.joined(request) as replica:
            assert replica is not before
            assert (replica.channel, replica.stub) == (before.channel, before.stub)
            assert replica.channel.get_state() != grpc.ChannelConnectivity.SHUTDOWN
            assert (replica.outstanding, replica.draining) == (1, "SIGTERM")
            assert replica.line.failures_in_a_row == 2
            work.close()
            assert replica.outstanding == 0
            # What the old one is blamed for, the new one has done.
            run.fleet.failed(before, "UNAVAILABLE")
            assert replica.is_quarantined()


async def test_a_replica_that_moved_has_a_line_of_its_own(run: Run) -> None:
    run.publish(1)
    with run.fleet.members.joined(subscription_request()) as before:
        before.line.outstanding = 3
    moved = subscription_request()
    moved.advertised_address = "elsewhere:1"
    with run.fleet.members.joined(moved) as replica:
        assert replica.channel is not before.channel
        assert (replica.address, replica.outstanding) == ("elsewhere:1", 0)


async def test_the_line_of_a_replica_that_stays_away_is_closed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """faults.md 27, AReaL#1385: nothing is kept of those who left."""
    monkeypatch.setattr(lines, "_KEEP_SECONDS", 0.05)
    run.publish(1)
    with run.fleet.members.joined(subscription_request()) as before:
        pass
    await eventually(lambda: _is_closed(before.channel))
    with run.fleet.members.joined(subscription_request()) as replica:
        assert replica.channel is not before.channel
        await asyncio.sleep(0.1)
        assert not _is_closed(replica.channel)


def _is_closed(channel: grpc.aio.Channel) -> bool:
    try:
        return channel.get_state() == grpc.ChannelConnectivity.SHUTDOWN
    except grpc.aio.UsageError:
        return True


@pytest.mark.parametrize("back", [False, True])
async def test_the_children_of_a_lost_relay_leave_it_after_a_lease(back: bool) -> None:
    """faults.md 23, prime-rl#2230: a relay that lost the trainer feeds its children nothing new."""
    pace = Pace(heartbeat_seconds=0.05, lease_seconds=0.1)
    publisher = Publisher("run", keep=2, pace=pace)
    fleet = Fleet(BaseModel("m", "base"), publisher, fan_out=1)
    Run(fleet, publisher).publish(1)
    relay, request = subscription_request(relay=True), subscription_request("child")
    with contextlib.ExitStack() as stack:
        with fleet.members.joined(relay):
            child = stack.enter_context(fleet.members.joined(request))
        assert child.subscription.parent == Parent("r1", "r1:1")
        if back:
            stack.enter_context(fleet.members.joined(relay))
        loop = asyncio.get_running_loop()
        lost_at = loop.time()
        while loop.time() < lost_at + 0.15:
            for replica in fleet.replicas:
                fleet.members.renew(adapter_pb2.RenewLeaseRequest(replica_id=replica.id))
            await asyncio.sleep(0.02)
        assert child.subscription.ended == ("" if back else "its relay r1 was lost")
        with fleet.members.joined(request) as again:
            assert again.subscription.parent == (Parent("r1", "r1:1") if back else None)
    await fleet.close()
