"""Who is waited for, and who gets a prompt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
from refit.v1 import adapter_pb2

from common.errors import Incompatible, WaitExpired
from tests.subscriptions import Run, committed, refused, subscription_request
from trainer_svc.fleet import Replica
from trainer_svc.fleet import fleet as fleet_module

ANY: frozenset[str] = frozenset()


@contextlib.contextmanager
def _joined(run: Run, *names: str) -> Iterator[list[Replica]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(run.fleet.members.joined(subscription_request(name)))
            for name in names
        ]


async def test_the_least_busy_replica_takes_the_prompt(run: Run) -> None:
    ref = run.publish(1)
    with _joined(run, "r1", "r2"):
        for name in ("r1", "r2"):
            run.fleet.report(committed(name, ref))
        with (
            run.fleet.leased("default", 1, avoid=ANY) as first,
            run.fleet.leased("default", 1, avoid=ANY) as second,
            run.fleet.leased("default", 1, avoid=frozenset({first.id})) as third,
        ):
            assert {first.id, second.id} == {"r1", "r2"}
            assert third is second
            assert (first.outstanding, second.outstanding) == (1, 2)
        assert (first.outstanding, second.outstanding) == (0, 0)


async def test_prompts_go_to_those_who_take_them(run: Run) -> None:
    """faults.md 6, prime-rl#1564: none to a replica that is behind, drains or is in quarantine."""
    first, second = run.publish(1), run.publish(2)
    with _joined(run, "behind", "drains", "wrong", "ready") as replicas:
        run.fleet.report(committed("behind", first))
        for name in ("drains", "wrong", "ready"):
            run.fleet.report(committed(name, first, second))
        drain = adapter_pb2.RenewLeaseRequest(replica_id="drains", draining=True)
        run.fleet.members.renew(drain)
        run.fleet.quarantine(replicas[2], "answered with the base model")
        for _ in range(3):
            with run.fleet.leased("default", 2, avoid=ANY) as replica:
                assert replica.id == "ready"
        only_ready = frozenset({"ready"})
        assert not await run.fleet.wait_for_any(
            "default", 2, avoid=only_ready, timeout_seconds=0.01
        )
        assert await run.fleet.wait_for_any("default", 1, avoid=only_ready, timeout_seconds=1)


async def test_three_failures_in_a_row_are_a_quarantine_with_an_end(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "_QUARANTINE_SECONDS", 0.1)
    ref = run.publish(1)
    with _joined(run, "r1") as [replica]:
        run.fleet.report(committed("r1", ref))
        for _ in range(2):
            run.fleet.failed(replica, "UNAVAILABLE")
        run.fleet.answered(replica)
        for _ in range(2):
            run.fleet.failed(replica, "UNAVAILABLE")
        assert replica.takes_prompts("default")
        run.fleet.failed(replica, "UNAVAILABLE")
        assert run.fleet.state(replica).reason == (
            "failed 3 prompts in a row, the last by: UNAVAILABLE; for 0.1 s"
        )
        assert not replica.takes_prompts("default")
        # Whoever waits is woken by its end.
        run.fleet.members.renew(adapter_pb2.RenewLeaseRequest(replica_id="r1"))
        assert await run.fleet.wait_for_any("default", 1, avoid=ANY, timeout_seconds=5)


async def test_failures_do_not_shorten_a_quarantine_for_wrong_answers(run: Run) -> None:
    """faults.md 2, verl#3821: a replica that served the base model waits for another version."""
    ref = run.publish(1)
    with _joined(run, "r1") as [replica]:
        run.fleet.report(committed("r1", ref))
        run.fleet.quarantine(replica, "answered with the base model")
        for _ in range(3):
            run.fleet.failed(replica, "UNAVAILABLE")
        assert replica.quarantine is not None
        assert not replica.quarantine.timed
        assert run.fleet.state(replica).reason == "answered with the base model"


async def test_waiting_ends_when_every_replica_has_answered(run: Run) -> None:
    ref = run.publish(1)
    with _joined(run, "r1", "r2"):
        waiting = asyncio.ensure_future(
            run.fleet.wait_for("default", 1, replicas=1, timeout_seconds=5, straggler_seconds=5)
        )
        run.fleet.report(committed("r1", ref))
        run.fleet.report(refused("r2", ref, stage=adapter_pb2.UPDATE_STAGE_WIRE))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        run.fleet.report(refused("r2", ref))

        assert [replica.id for replica in await waiting] == ["r1"]


async def test_waiting_in_vain_says_why(run: Run) -> None:
    """faults.md 23, TRL#6797: every wait has a deadline."""
    wait = {"replicas": 2, "timeout_seconds": 0.01, "straggler_seconds": 5.0}
    ref = run.publish(1)
    with (
        _joined(run, "r1", "r2"),
        pytest.raises(
            WaitExpired,
            match=r"default@1: 2 replicas must serve it, 1 do; "
            r"r1: REPLICA_STATE_READY \(.*\); r2: REPLICA_STATE_JOINING \(receives default@1\)$",
        ),
    ):
        run.fleet.report(committed("r1", ref))
        await run.fleet.wait_for("default", 1, **wait)  # type: ignore[arg-type]
    with pytest.raises(WaitExpired, match="0 do; none is subscribed"):
        await run.fleet.wait_for("default", 1, **wait)  # type: ignore[arg-type]
    odd = subscription_request("r3")
    odd.base_model.fingerprint = "other"
    with pytest.raises(Incompatible), run.fleet.members.joined(odd):
        pass
    with pytest.raises(WaitExpired, match=r"0 do; .*: refused \(base_model: the replica has"):
        await run.fleet.wait_for("default", 1, **wait)  # type: ignore[arg-type]


async def test_those_who_will_not_have_it_are_not_waited_for(run: Run) -> None:
    """faults.md 23, prime-rl#2230: nobody can stall a step."""
    ref = run.publish(1)
    observer = subscription_request("observer")
    observer.adapters.append("another")
    with _joined(run, "r1", "drains"), run.fleet.members.joined(observer):
        drain = adapter_pb2.RenewLeaseRequest(replica_id="drains", draining=True)
        run.fleet.members.renew(drain)
        run.fleet.report(committed("r1", ref))
        async with asyncio.timeout(0.15):
            ready = await run.fleet.wait_for(
                "default", 1, replicas=1, timeout_seconds=60, straggler_seconds=60
            )
    assert [replica.id for replica in ready] == ["r1"]


async def test_a_straggler_is_waited_for_only_so_long(run: Run) -> None:
    ref = run.publish(1)
    with _joined(run, "r1", "hung"):
        run.fleet.report(committed("r1", ref))
        async with asyncio.timeout(0.15):
            ready = await run.fleet.wait_for(
                "default", 1, replicas=1, timeout_seconds=60, straggler_seconds=0.01
            )
    assert [replica.id for replica in ready] == ["r1"]


async def test_who_leaves_while_others_are_waited_for_is_not_counted(run: Run) -> None:
    """faults.md 23, TRL#6797: a step never begins with fewer replicas than it needs."""
    ref = run.publish(1)
    with _joined(run, "slow"):
        with _joined(run, "dies"):
            run.fleet.report(committed("dies", ref))
            waiting = asyncio.ensure_future(
                run.fleet.wait_for(
                    "default", 1, replicas=1, timeout_seconds=5, straggler_seconds=0.01
                )
            )
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        run.fleet.report(committed("slow", ref))

        assert [replica.id for replica in await waiting] == ["slow"]


async def test_wrong_answers_are_not_forgiven_for_an_alias(run: Run) -> None:
    """faults.md 2, verl#3821: it must commit a newer version of what it served."""
    first, alias = run.publish(1), run.publish(1, adapter="old")
    with _joined(run, "r1") as [replica]:
        run.fleet.report(committed("r1", first))
        run.fleet.quarantine(replica, "answered with the base model")
        run.fleet.report(committed("r1", first, alias))
        assert (replica.takes_prompts("default"), replica.takes_prompts("old")) == (False, False)
        run.fleet.report(committed("r1", alias, run.publish(2)))
        assert (replica.takes_prompts("default"), replica.takes_prompts("old")) == (True, True)


async def test_a_second_quarantine_begins_after_the_first_has_ended(run: Run) -> None:
    run.publish(1)
    with _joined(run, "r1") as [replica]:
        run.fleet.report(committed("r1", run.publish(2)))
        run.fleet.quarantine(replica, "the first")
        run.fleet.report(committed("r1", run.publish(3)))
        assert replica.takes_prompts("default")
        run.fleet.quarantine(replica, "the second")
        assert not replica.takes_prompts("default")
        assert run.fleet.state(replica).reason == "the second"


async def test_those_who_take_no_prompts_do_not_count(run: Run) -> None:
    """faults.md 23, TRL#6797: a step waits for somebody who can answer it."""
    ref = run.publish(1)
    with _joined(run, "wrong", "right") as [wrong, _]:
        run.fleet.report(committed("wrong", ref))
        run.fleet.quarantine(wrong, "answered with the base model")
        with pytest.raises(WaitExpired, match="1 replicas must serve it, 0 do"):
            await run.fleet.wait_for(
                "default", 1, replicas=1, timeout_seconds=0.01, straggler_seconds=0
            )
        run.fleet.report(committed("right", ref))
        ready = await run.fleet.wait_for(
            "default", 1, replicas=1, timeout_seconds=5, straggler_seconds=5
        )
    assert [replica.id for replica in ready] == ["right"]


async def test_wrong_answers_outlast_a_quarantine_that_has_an_end(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "_QUARANTINE_SECONDS", 0.02)
    ref = run.publish(1)
    with _joined(run, "r1") as [replica]:
        run.fleet.report(committed("r1", ref))
        for _ in range(3):
            run.fleet.failed(replica, "UNAVAILABLE")
        run.fleet.quarantine(replica, "answered with the base model")
        await asyncio.sleep(0.05)
        assert run.fleet.state(replica).reason == "answered with the base model"
        assert not replica.takes_prompts("default")
