"""Whole models over the stream: a trainer's node and a replica, real in all but the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest
import torch
from refit.v1 import rollout_pb2, rollout_pb2_grpc
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.adapter import Dtype, Kind, Layout, Manifest, TensorEntry, plan, seal
from common.grpc_server import connect
from common.model_dir import BaseModel, base_model
from common.peft_dir import MODEL_FILE
from rollout_svc.config import RolloutConfig
from rollout_svc.engine import BoundReport, Capabilities
from rollout_svc.replica import Replica
from tests.adapters import make_adapter
from tests.eventually import eventually
from tests.fake_engine import FakeEngine
from trainer_svc.config import ServerSettings
from trainer_svc.control import RunControl
from trainer_svc.fleet.replica import Replica as Member
from trainer_svc.node import Node, serve_node

NAMES = ("lm_head.weight", "model.norm.weight", "model.embed_tokens.weight")


@dataclass(slots=True)
class ReadingEngine(FakeEngine):
    """Keeps what it loads in place of its own weights."""

    read: list[dict[str, Tensor]] = field(default_factory=list)
    takes: tuple[Kind, ...] = tuple(Kind)

    @property
    def capabilities(self) -> Capabilities:
        return replace(FakeEngine().capabilities, max_loras=self.slots, kinds=self.takes)

    async def load_weights(self, path: Path | None) -> list[BoundReport]:
        assert path is not None
        self.read.append(load_file(path / MODEL_FILE))
        return await FakeEngine.load_weights(self, path)


@pytest.fixture
def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(256, 64, generator=generator).bfloat16() for name in NAMES}


@pytest.fixture
def model_dir(tmp_path: Path, weights: dict[str, Tensor]) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    save_file(weights, path / "model.safetensors")
    return path


@pytest.fixture
async def node(model_dir: Path) -> AsyncIterator[Node]:
    settings = ServerSettings(port=0, delta="always")
    control = RunControl("run", steps_total=0)
    async with serve_node(settings, base=base_model(model_dir), control=control, engine="") as node:
        yield node


@asynccontextmanager
async def joined(
    node: Node,
    engine: FakeEngine,
    base: BaseModel,
    staging: Path,
    *,
    load_format: str = "auto",
) -> AsyncIterator[Member]:
    """A replica that follows the node, as the node's fleet sees it."""
    config = RolloutConfig(
        model=Path("m"),
        trainer_address=node.server.address,
        grace_seconds=0,
        engine={"load_format": load_format},
    )
    replica = Replica(config, engine, base=base, replica_id="replica", staging=staging)
    stopped = asyncio.Event()
    serving = asyncio.create_task(replica.serve(stopped))
    try:
        await eventually(lambda: node.fleet.replicas)
        yield node.fleet.replicas[0]
    finally:
        stopped.set()
        async with asyncio.timeout(5):
            await serving


def merged_of(weights: dict[str, Tensor], base: BaseModel) -> tuple[Manifest, memoryview]:
    specs = plan(
        TensorEntry(name, Dtype.BFLOAT16, tuple(weight.shape), Layout.WEIGHT)
        for name, weight in weights.items()
    )
    buffer = memoryview(
        b"".join(weights[spec.name].view(torch.uint8).numpy().tobytes() for spec in specs)
    )
    return Manifest(base.fingerprint, None, seal(specs, buffer), Kind.MERGED), buffer


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )


async def test_a_replica_without_weights_gets_the_base_and_then_the_adapter(
    node: Node, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    """faults.md 11, vllm#31104: bit for bit the weights of the directory, and only once."""
    manifest, buffer = make_adapter(base=node.base.fingerprint)
    node.fleet.require(manifest)
    node.publisher.publish("default", manifest, buffer, version=1)
    engine = ReadingEngine(slots=4)
    bare = BaseModel("m", "")
    async with joined(node, engine, bare, tmp_path / "s", load_format="dummy") as member:
        await eventually(lambda: member.serves("default", 1))
        assert len(engine.read) == 1 and equal(engine.read[0], weights)
        assert len(engine.loaded) == 1
        second = make_adapter(base=node.base.fingerprint, seed=2)
        node.publisher.publish("default", *second, version=2)
        await eventually(lambda: member.serves("default", 2))
        assert len(engine.read) == 1
        assert not member.refusals


async def test_merged_versions_travel_as_deltas_and_are_served_one_at_a_time(
    node: Node, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    manifest, buffer = merged_of(weights, node.base)
    node.fleet.require(manifest)
    node.publisher.publish("default", manifest, buffer, version=1)
    engine = ReadingEngine(slots=4)
    async with joined(node, engine, node.base, tmp_path / "s") as member:
        await eventually(lambda: member.serves("default", 1))
        first_bytes = member.wire_bytes
        stepped = {name: weight * 1.0078125 for name, weight in weights.items()}
        stepped["lm_head.weight"] = weights["lm_head.weight"]
        second = node.publisher.publish("default", *merged_of(stepped, node.base), version=2)
        await eventually(lambda: member.serves("default", 2))

        assert equal(engine.read[0], weights) and equal(engine.read[1], stepped)
        assert engine.loaded == {}
        assert member.wire_bytes < first_bytes / 2
        async with connect(member.address) as channel:
            stub = rollout_pb2_grpc.RolloutServiceStub(channel)
            answer = [message async for message in stub.Generate(request(2))]
            assert answer[0].adapter.digest == second.digest
            assert engine.salts[-1].startswith(f"default@2-{second.digest.hex()[:16]}-")
            for selector, code, text in (
                (request(1), grpc.StatusCode.NOT_FOUND, "default@1 is not served"),
                (base_request(), grpc.StatusCode.FAILED_PRECONDITION, "base is not served"),
            ):
                with pytest.raises(grpc.aio.AioRpcError, match=text) as caught:
                    async for _ in stub.Generate(selector):
                        pass
                assert caught.value.code() == code


def request(version: int) -> rollout_pb2.GenerateRequest:
    return rollout_pb2.GenerateRequest(
        token_ids=rollout_pb2.TokenIds(ids=[5, 6]),
        sampling=rollout_pb2.SamplingParams(max_tokens=2),
        adapter=rollout_pb2.AdapterSelector(
            adapter="default", rule=rollout_pb2.VERSION_RULE_EXACT, version=version
        ),
    )


def base_request() -> rollout_pb2.GenerateRequest:
    made = request(1)
    made.adapter.CopyFrom(rollout_pb2.AdapterSelector(rule=rollout_pb2.VERSION_RULE_BASE))
    return made


async def test_a_replica_that_cannot_take_merged_weights_is_refused_at_once(
    node: Node, weights: dict[str, Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before step 0, with the reason on both sides."""
    node.fleet.require(merged_of(weights, node.base)[0])
    engine = ReadingEngine(slots=4, takes=(Kind.LORA,))
    config = RolloutConfig(model=Path("m"), trainer_address=node.server.address, grace_seconds=0)
    replica = Replica(config, engine, base=node.base, replica_id="r", staging=tmp_path / "s")
    stopped = asyncio.Event()
    serving = asyncio.create_task(replica.serve(stopped))
    await eventually(lambda: "refuses this replica" in caplog.text)
    assert "capabilities.kinds: the replica takes LORA, the run publishes MERGED" in caplog.text
    assert not node.fleet.replicas
    stopped.set()
    await serving
