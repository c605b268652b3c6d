"""Who may join, what a report changes, who gets a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from refit.v1 import adapter_pb2, tensor_pb2, version_pb2

from common.adapter import AdapterRef
from common.errors import (
    AlreadyExists,
    CorruptUpdate,
    Incompatible,
    InvalidField,
    ReplicaNotFound,
    Unavailable,
    WaitExpired,
)
from common.model_dir import BaseModel
from common.wire import ref_to_proto
from tests.adapters import make_adapter, make_ref
from trainer_svc.fleet import Fleet

Request = adapter_pb2.AdapterUpdateRequest
MANIFEST, _ = make_adapter()


def _request(replica_id: str = "r1") -> Request:
    return Request(
        replica_id=replica_id,
        advertised_address="127.0.0.1:1",
        base_model=version_pb2.BaseModel(name="m", fingerprint="f"),
        capabilities=adapter_pb2.ReplicaCapabilities(
            max_rank=8,
            target_modules=["q_proj", "k_proj"],
            dtypes=[tensor_pb2.DTYPE_FLOAT32],
        ),
    )


def _report(replica_id: str, ref: AdapterRef) -> adapter_pb2.ReportAdapterRequest:
    return adapter_pb2.ReportAdapterRequest(
        replica_id=replica_id, ref=ref_to_proto(ref), outcome=adapter_pb2.OUTCOME_COMMITTED
    )


@pytest.fixture
async def published() -> list[AdapterRef]:
    return [make_ref(MANIFEST)]


@pytest.fixture
async def fleet(published: list[AdapterRef]) -> Fleet:
    fleet = Fleet(BaseModel("m", "f"), published=lambda: published)
    fleet.require(MANIFEST)
    return fleet


UNFIT: dict[str, tuple[Callable[[Request], object], type[Exception], str]] = {
    "no id": (lambda r: r.ClearField("replica_id"), InvalidField, "replica_id"),
    "no port": (lambda r: setattr(r, "advertised_address", "h"), InvalidField, "host:port"),
    "base": (
        lambda r: setattr(r.base_model, "fingerprint", "g"),
        Incompatible,
        r"\(fingerprint 'g'\).*\(fingerprint 'f'\)",
    ),
    "rank": (lambda r: setattr(r.capabilities, "max_rank", 1), Incompatible, "max_rank: 1"),
    "modules": (
        lambda r: r.capabilities.target_modules.remove("k_proj"),
        Incompatible,
        "cannot adapt k_proj",
    ),
    "dtype": (lambda r: r.capabilities.ClearField("dtypes"), Incompatible, "not take F32"),
}


@pytest.mark.parametrize("name", UNFIT)
async def test_a_replica_that_cannot_serve_the_run_is_refused(fleet: Fleet, name: str) -> None:
    change, error, expected = UNFIT[name]
    request = _request()
    change(request)

    with pytest.raises(error, match=expected), fleet.joined(request):
        pass

    assert fleet.replicas == []


async def test_a_refusal_gives_every_reason(fleet: Fleet) -> None:
    request = _request()
    request.base_model.fingerprint = "g"
    request.capabilities.Clear()

    with pytest.raises(Incompatible) as caught, fleet.joined(request):
        pass

    for field in ("base_model", "max_rank", "target_modules", "dtypes"):
        assert field in str(caught.value)


async def test_before_the_first_adapter_a_subscriber_is_asked_to_come_again() -> None:
    fleet = Fleet(BaseModel("m", "f"), published=list)

    with pytest.raises(Unavailable), fleet.joined(_request()):
        pass


async def test_an_id_in_use_is_refused_and_free_again_afterwards(fleet: Fleet) -> None:
    with (
        fleet.joined(_request()),
        pytest.raises(AlreadyExists, match="'r1'"),
        fleet.joined(_request()),
    ):
        pass
    with fleet.joined(_request()) as replica:
        assert fleet.replicas == [replica]


async def test_no_prompt_before_the_report(fleet: Fleet, published: list[AdapterRef]) -> None:
    """faults.md 6, miles#1724: a replica gets traffic once it holds the version."""
    with fleet.joined(_request()):
        assert not await fleet.wait_for_any("default", 1, avoid=frozenset(), timeout_seconds=0.01)
        fleet.report(_report("r1", published[0]))
        with fleet.leased("default", 1, avoid=frozenset()) as replica:
            assert replica.id == "r1"


async def test_a_report_of_other_bytes_is_corrupt(
    fleet: Fleet, published: list[AdapterRef]
) -> None:
    """faults.md 1, verl#7495: what a replica serves is what was published."""
    other = replace(published[0], digest=b"x" * 32)
    with fleet.joined(_request()) as replica:
        with pytest.raises(CorruptUpdate, match="published was"):
            fleet.report(_report("r1", other))
        assert not replica.serves("default", 1)


async def test_a_report_without_a_subscription_is_not_found(fleet: Fleet) -> None:
    with pytest.raises(ReplicaNotFound, match="'r1'"):
        fleet.report(_report("r1", make_ref(MANIFEST)))


async def test_a_replica_that_holds_the_version_on_joining_serves_it(
    fleet: Fleet, published: list[AdapterRef]
) -> None:
    request = _request()
    request.held.append(ref_to_proto(published[0]))
    request.held.append(ref_to_proto(replace(published[0], run_id="another run")))

    with fleet.joined(request) as replica:
        assert list(replica.committed.values()) == published


async def test_the_least_busy_replica_takes_the_prompt(
    fleet: Fleet, published: list[AdapterRef]
) -> None:
    with fleet.joined(_request("r1")), fleet.joined(_request("r2")):
        for name in ("r1", "r2"):
            fleet.report(_report(name, published[0]))
        with (
            fleet.leased("default", 1, avoid=frozenset()) as first,
            fleet.leased("default", 1, avoid=frozenset()) as second,
            fleet.leased("default", 1, avoid=frozenset({first.id})) as third,
        ):
            assert {first.id, second.id} == {"r1", "r2"}
            assert third is second
            assert (first.outstanding, second.outstanding) == (1, 2)
        assert (first.outstanding, second.outstanding) == (0, 0)


async def test_waiting_ends_when_every_replica_has_answered(
    fleet: Fleet, published: list[AdapterRef]
) -> None:
    with fleet.joined(_request("r1")), fleet.joined(_request("r2")):
        waiting = asyncio.ensure_future(
            fleet.wait_for("default", 1, replicas=1, timeout_seconds=5, straggler_seconds=5)
        )
        fleet.report(_report("r1", published[0]))
        await asyncio.sleep(0)
        assert not waiting.done()
        refusal = _report("r2", published[0])
        refusal.outcome, refusal.reason = adapter_pb2.OUTCOME_REFUSED, "no room"
        fleet.report(refusal)

        assert [replica.id for replica in await waiting] == ["r1"]


async def test_waiting_in_vain_says_why(fleet: Fleet) -> None:
    """faults.md 23, TRL#6797: every wait has a deadline."""
    with fleet.joined(_request()), pytest.raises(WaitExpired, match="r1: has not committed it"):
        await fleet.wait_for("default", 1, replicas=1, timeout_seconds=0.01, straggler_seconds=5)
    with pytest.raises(WaitExpired, match="none is subscribed"):
        await fleet.wait_for("default", 1, replicas=1, timeout_seconds=0.01, straggler_seconds=5)
    await fleet.close()


async def test_a_subscriber_that_wants_another_adapter_is_not_waited_for(
    fleet: Fleet, published: list[AdapterRef]
) -> None:
    """faults.md 23, prime-rl#2230: nobody can stall a step."""
    observer = _request("observer")
    observer.adapters.append("another")
    with fleet.joined(_request("r1")), fleet.joined(observer):
        fleet.report(_report("r1", published[0]))
        async with asyncio.timeout(5):
            ready = await fleet.wait_for(
                "default", 1, replicas=1, timeout_seconds=60, straggler_seconds=60
            )
    assert [replica.id for replica in ready] == ["r1"]


async def test_a_straggler_is_waited_for_only_so_long(
    fleet: Fleet, published: list[AdapterRef]
) -> None:
    with fleet.joined(_request("r1")), fleet.joined(_request("hung")):
        fleet.report(_report("r1", published[0]))
        async with asyncio.timeout(5):
            ready = await fleet.wait_for(
                "default", 1, replicas=1, timeout_seconds=60, straggler_seconds=0.01
            )
    assert [replica.id for replica in ready] == ["r1"]


async def test_a_report_of_what_was_never_published_is_refused(
    fleet: Fleet, published: list[AdapterRef]
) -> None:
    with fleet.joined(_request()) as replica:
        with pytest.raises(InvalidField, match="never published"):
            fleet.report(_report("r1", replace(published[0], version=99)))
        assert not replica.serves("default", 1)
