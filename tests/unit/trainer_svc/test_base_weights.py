"""The base's own weights, sent once and first to replicas that started without them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.adapter import BASE_NAME, Dtype, Kind, Layout
from common.errors import ConfigError
from tests.adapters import make_adapter
from tests.large_adapters import receive
from tests.publishing import PACE, kind, subscribed
from trainer_svc.base_weights import BaseWeights, read_base
from trainer_svc.publisher import Publisher
from trainer_svc.subscription import Subscription

WEIGHTS = {
    "model.embed_tokens.weight": torch.arange(12.0).view(4, 3).bfloat16(),
    "model.norm.weight": torch.tensor([1.5, -2.0]),
    "model.layers.0.mlp.gate.weight": torch.ones(2, 2, 2, dtype=torch.float16),
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """Three tensors of three types in two files."""
    first, *others = WEIGHTS
    save_file({first: WEIGHTS[first]}, tmp_path / "model-00001-of-00002.safetensors")
    rest = {name: WEIGHTS[name] for name in others}
    save_file(rest, tmp_path / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    return tmp_path


@pytest.fixture
async def publisher(model_dir: Path) -> AsyncIterator[Publisher]:
    base = BaseWeights(model_dir, base_fingerprint="base")
    publisher = Publisher("run", keep=2, pace=PACE, base=base)
    async with asyncio.timeout(10):
        yield publisher
    publisher.close()


def test_every_tensor_is_read_bit_for_bit(model_dir: Path) -> None:
    read = read_base(model_dir, base_fingerprint="base")
    manifest = read.manifest
    assert (manifest.kind, manifest.lora, manifest.base_fingerprint) == (Kind.BASE, None, "base")
    assert {spec.name: (spec.dtype, spec.shape) for spec in manifest.tensors} == {
        "model.embed_tokens.weight": (Dtype.BFLOAT16, (4, 3)),
        "model.norm.weight": (Dtype.FLOAT32, (2,)),
        "model.layers.0.mlp.gate.weight": (Dtype.FLOAT16, (2, 2, 2)),
    }
    for spec in manifest.tensors:
        assert spec.layout is Layout.WEIGHT
        own = WEIGHTS[spec.name].view(torch.uint8).numpy().tobytes()
        assert bytes(read.buffer[spec.offset_bytes : spec.end_bytes]) == own


def test_the_base_never_changes(model_dir: Path) -> None:
    """faults.md 15, miles#1087: its digest is that of the directory, whatever was trained."""
    digests = {read_base(model_dir, base_fingerprint="base").manifest.digest() for _ in range(3)}
    assert len(digests) == 1


def test_a_type_that_does_not_travel_is_refused(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2, dtype=torch.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"tensor 'x' has dtype I64; replicas without weights"):
        read_base(tmp_path, base_fingerprint="base")


async def test_the_base_comes_first_and_once(publisher: Publisher) -> None:
    """faults.md 11, vllm#31104."""
    first = publisher.publish("default", *make_adapter(seed=1), version=1)
    events = await subscribed(publisher, Subscription(needs_base=True))

    base = await receive(events)
    assert (base.manifest.kind, base.ref.adapter, base.ref.version) == (Kind.BASE, BASE_NAME, 1)
    assert publisher.base is not None
    assert base.ref == publisher.base.ref
    assert (await receive(events)).ref == first
    second = publisher.publish("default", *make_adapter(seed=2), version=2)
    assert (await receive(events)).ref == second
    assert kind(await anext(events)) == "heartbeat"


async def test_others_never_get_the_base(publisher: Publisher) -> None:
    ref = publisher.publish("default", *make_adapter(), version=1)
    events = await subscribed(publisher)
    assert (await receive(events)).ref == ref
    assert kind(await anext(events)) == "heartbeat"


async def test_a_half_received_base_is_gone_on_with(publisher: Publisher) -> None:
    events = await subscribed(publisher, Subscription(needs_base=True))
    whole = await receive(events)
    partial = Subscription(needs_base=True, partial=(whole.ref, 5))

    rest = await receive(await subscribed(publisher, partial), first=bytes(whole.buffer[:5]))
    assert rest.chunks[0].offset_bytes == 5
    assert rest.buffer == whole.buffer


async def test_heartbeats_come_while_the_base_is_read(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large model takes longer to read than a replica waits for a sign of life."""
    may_read = asyncio.Event()
    assert publisher.base is not None
    content = await publisher.base.content("run")

    async def slow(run_id: str) -> object:
        await may_read.wait()
        return content

    monkeypatch.setattr(publisher.base, "content", slow)
    events = await subscribed(publisher, Subscription(needs_base=True))
    assert [kind(await anext(events)) for _ in range(2)] == ["heartbeat"] * 2
    may_read.set()
    assert (await receive(events)).manifest.kind is Kind.BASE


async def test_the_bytes_are_shared_and_gone_after_the_last_replica(publisher: Publisher) -> None:
    base = publisher.base
    assert base is not None
    first, second = await asyncio.gather(base.content("run"), base.content("run"))
    assert first is second
    del first, second
    await asyncio.sleep(0)
    gc.collect()
    assert base._kept is not None
    assert base._kept() is None
