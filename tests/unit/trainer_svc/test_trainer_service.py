"""The trainer over real gRPC: messages, statuses, tokens."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import urllib.request
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from refit.v1 import (
    adapter_pb2,
    adapter_pb2_grpc,
    tensor_pb2,
    trainer_pb2,
    trainer_pb2_grpc,
    version_pb2,
    version_pb2_grpc,
)

from common.adapter import AdapterRef
from common.errors import ConfigError
from common.grpc_server import connect
from common.model_dir import BaseModel
from common.security import SecuritySettings
from common.token_channel import TokenChannel
from common.wire import ref_to_proto
from tests.adapters import make_adapter
from tests.eventually import eventually
from tests.large_adapters import make_large
from tests.subscriptions import committed, refused, subscription_request
from trainer_svc.config import ServerSettings
from trainer_svc.control import RunControl
from trainer_svc.fleet import members
from trainer_svc.node import Node, serve_node

Stub = adapter_pb2_grpc.AdapterServiceStub


@contextlib.asynccontextmanager
async def _node(**settings: Any) -> AsyncIterator[Node]:
    control = RunControl("run", steps_total=3)
    server = ServerSettings(port=0, heartbeat_seconds=0.05, **settings)
    async with (
        asyncio.timeout(20),
        serve_node(server, base=BaseModel("m", "base"), control=control, engine="") as node,
    ):
        yield node


def _publish(node: Node, version: int) -> AdapterRef:
    manifest, buffer = make_adapter(seed=version)
    node.fleet.require(manifest)
    return node.publisher.publish("default", manifest, buffer, version=version)


async def test_a_replica_subscribes_reports_and_is_shown() -> None:
    async with _node() as node, connect(node.server.address) as channel:
        ref = _publish(node, 1)
        call = Stub(channel).AdapterUpdate(subscription_request())
        kinds = [(await call.read()).WhichOneof("event") for _ in range(4)]
        await Stub(channel).ReportAdapter(committed("r1", ref))
        renewal = adapter_pb2.RenewLeaseRequest(replica_id="r1")
        lease = await Stub(channel).RenewLease(renewal)
        listed = await Stub(channel).ListAdapters(adapter_pb2.AdapterServiceListAdaptersRequest())
        status = await trainer_pb2_grpc.TrainerServiceStub(channel).GetStatus(
            trainer_pb2.GetStatusRequest()
        )
        version = await version_pb2_grpc.VersionServiceStub(channel).GetVersion(
            version_pb2.GetVersionRequest()
        )
        call.cancel()

    assert kinds == ["heartbeat", "manifest", "chunk", "commit"]
    assert lease.lease_seconds == 15
    assert list(listed.adapters) == list(version.adapters) == [ref_to_proto(ref)]
    assert (version.service, version.engine, version.base_model.name) == ("trainer", "", "m")
    assert {"alias", "held", "delta_zstd", "resume", "relay"} <= set(version.capabilities)
    assert (status.run_id, status.steps_total) == ("run", 3)
    [replica] = status.replicas
    assert (replica.replica_id, replica.state) == ("r1", trainer_pb2.REPLICA_STATE_READY)
    assert list(replica.adapters) == [ref_to_proto(ref)]


def _wrong_digest(ref: AdapterRef) -> adapter_pb2.ReportAdapterRequest:
    report = committed("r1", ref)
    report.ref.digest = b"x" * 32
    return report


def _unpublished(ref: AdapterRef) -> adapter_pb2.ReportAdapterRequest:
    report = committed("r1", ref)
    report.ref.version = 9
    return report


CALLS: dict[str, tuple[Callable[[Stub, AdapterRef], Any], grpc.StatusCode]] = {
    "unknown replica": (
        lambda stub, ref: stub.ReportAdapter(committed("nobody", ref)),
        grpc.StatusCode.NOT_FOUND,
    ),
    "lease of nobody": (
        lambda stub, ref: stub.RenewLease(adapter_pb2.RenewLeaseRequest(replica_id="nobody")),
        grpc.StatusCode.NOT_FOUND,
    ),
    "other bytes": (
        lambda stub, ref: stub.ReportAdapter(_wrong_digest(ref)),
        grpc.StatusCode.DATA_LOSS,
    ),
    "never published": (
        lambda stub, ref: stub.ReportAdapter(_unpublished(ref)),
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
}


@pytest.mark.parametrize("name", CALLS)
async def test_errors_have_their_status(name: str) -> None:
    make_call, code = CALLS[name]
    async with _node() as node, connect(node.server.address) as channel:
        ref = _publish(node, 1)
        call = Stub(channel).AdapterUpdate(subscription_request())
        await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await make_call(Stub(channel), ref)
        call.cancel()
    assert caught.value.code() == code


async def test_a_second_replica_with_the_same_id_already_exists() -> None:
    async with _node() as node, connect(node.server.address) as channel:
        _publish(node, 1)
        call = Stub(channel).AdapterUpdate(subscription_request())
        await call.read()
        other = subscription_request()
        other.advertised_address = "elsewhere:1"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Stub(channel).AdapterUpdate(other).read()
        call.cancel()
    assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS


async def test_a_subscription_ends_in_order_when_the_trainer_stops() -> None:
    """faults.md 23, TRL#6797: an open stream does not eat the grace, nobody waits for its end."""
    async with contextlib.AsyncExitStack() as channels:
        async with _node() as node:
            channel = await channels.enter_async_context(connect(node.server.address))
            _publish(node, 1)
            call = Stub(channel).AdapterUpdate(subscription_request())
            await call.read()
            begun = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - begun < 2
        while await call.read() is not grpc.aio.EOF:
            pass
        assert await call.code() == grpc.StatusCode.OK


async def test_a_reader_that_hangs_is_cut_off_and_its_update_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """faults.md 27, AReaL#1385: it renews its lease and takes no byte; nothing is kept for it."""
    monkeypatch.setattr(members, "_END_SECONDS", 0.05)
    async with (
        _node(stall_seconds=0.1, keep_versions=1) as node,
        connect(node.server.address) as channel,
    ):
        manifest, buffer = make_large(tensors=16, width=65536)
        request = subscription_request()
        request.capabilities.target_modules[:] = ["q_proj"]
        request.capabilities.dtypes[:] = [tensor_pb2.DTYPE_BFLOAT16]
        node.fleet.require(manifest)
        node.publisher.publish("default", manifest, buffer, version=1)
        content = weakref.ref(node.publisher.store.newest("default"))
        call = Stub(channel).AdapterUpdate(request)
        await call.read()
        renewal = adapter_pb2.RenewLeaseRequest(replica_id="r1")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                await Stub(channel).RenewLease(renewal)
                await asyncio.sleep(0.02)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert [lost.reason for lost in node.fleet.members.lost] == ["it took no bytes for 0.1 s"]
        node.publisher.publish("default", *make_large(seed=1), version=2)
        await eventually(lambda: gc.collect() >= 0 and content() is None)
        call.cancel()


@pytest.fixture
def security(tmp_path: Path) -> SecuritySettings:
    """Whose server takes the token that its channels show, and another for generation alone."""
    (tmp_path / "tokens.toml").write_text(
        '[replicas]\ntoken = "0123456789abcdef"\nroles = ["subscribe"]\n'
        '[other]\ntoken = "fedcba9876543210"\nroles = ["generate"]\n'
    )
    (tmp_path / "token").write_text("0123456789abcdef\n")
    return SecuritySettings(tokens_file=tmp_path / "tokens.toml", token_file=tmp_path / "token")


async def test_a_secured_trainer_takes_tokens_and_shows_its_own(security: SecuritySettings) -> None:
    async with (
        _node(security=security, health_port=0) as node,
        connect(node.server.address) as stranger,
        connect(node.server.address, security) as channel,
        connect(f"127.0.0.1:{node.server.plaintext_health_port}") as probe,
    ):
        _publish(node, 1)
        call = Stub(channel).AdapterUpdate(subscription_request())
        assert (await call.read()).HasField("heartbeat")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Stub(stranger).AdapterUpdate(subscription_request("r2")).read()
        stub: Any = health_pb2_grpc.HealthStub(probe)
        health = await stub.Check(health_pb2.HealthCheckRequest())
        # Prompts go with the token too.
        [replica] = node.fleet.replicas
        assert isinstance(replica.channel, TokenChannel)
        call.cancel()

    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert health.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_file_of_security_that_cannot_be_used_is_an_error_at_start(tmp_path: Path) -> None:
    missing = SecuritySettings(tokens_file=tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="tokens_file"):
        async with _node(security=missing):
            pass


def _scrape(port: int | None) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return str(answer.read(), "ascii").splitlines()


async def test_prometheus_sees_the_fleet_from_its_own_thread() -> None:
    async with _node(metrics_port=0) as node:
        first, second = _publish(node, 1), _publish(node, 2)
        with contextlib.ExitStack() as stack:
            for name in ("ready", "refuses", "fails", "gone"):
                request = subscription_request(name, held=[first])
                replica = stack.enter_context(node.fleet.members.joined(request))
                if name == "ready":
                    node.fleet.report(committed(name, second))
                if name == "refuses":
                    node.fleet.report(refused(name, second, first))
                if name == "fails":
                    for _ in range(3):
                        node.fleet.failed(replica, "UNAVAILABLE")
            node.fleet.members.renew(adapter_pb2.RenewLeaseRequest(replica_id="ready"))
            with node.fleet.members.joined(subscription_request("lost")):
                pass
            lines = await asyncio.to_thread(_scrape, node.metrics_port)

    assert [line for line in lines if line.startswith("refit_trainer_replicas{")] == [
        'refit_trainer_replicas{state="joining"} 0.0',
        'refit_trainer_replicas{state="catching_up"} 1.0',
        'refit_trainer_replicas{state="ready"} 1.0',
        'refit_trainer_replicas{state="draining"} 0.0',
        'refit_trainer_replicas{state="lost"} 1.0',
        'refit_trainer_replicas{state="quarantined"} 2.0',
    ]


async def test_a_taken_metrics_port_is_an_error_that_leaves_nothing_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics_port: 127.0.0.1:{port} cannot be bound"):
            async with _node(metrics_port=port):
                pass
    for _ in range(2):
        async with _node(metrics_port=port) as node:
            assert node.metrics_port == port
