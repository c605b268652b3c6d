"""A trainer whose manifests are false, or not for this replica."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from refit.v1 import adapter_pb2

from common.adapter import AdapterRef, Manifest
from common.stream.frames import Event
from common.wire import manifest_to_proto
from tests.fake_trainer import update_events
from tests.integration.faults.liar import LiedTo
from tests.integration.faults.run import called
from tests.trainer_process import sized_adapter

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]


def _total(manifest: adapter_pb2.AdapterManifest) -> None:
    manifest.total_bytes += 4


def _size(manifest: adapter_pb2.AdapterManifest) -> None:
    manifest.tensors[0].size_bytes *= 2


def _offset(manifest: adapter_pb2.AdapterManifest) -> None:
    manifest.tensors[1].offset_bytes += 4


def _name_twice(manifest: adapter_pb2.AdapterManifest) -> None:
    manifest.tensors[2].name = manifest.tensors[0].name


def _name(manifest: adapter_pb2.AdapterManifest) -> None:
    manifest.tensors[0].name = "../../etc/passwd"


def _alias(manifest: adapter_pb2.AdapterManifest) -> None:
    manifest.tensors[3].alias_of = manifest.tensors[1].name


def _shape(manifest: adapter_pb2.AdapterManifest) -> None:
    manifest.tensors[0].shape[0] = -8


def _tensor_digest(manifest: adapter_pb2.AdapterManifest) -> None:
    manifest.tensors[0].digest = bytes(32)


def _digest(manifest: adapter_pb2.AdapterManifest) -> None:
    manifest.ref.digest = bytes(32)


def _alpha(manifest: adapter_pb2.AdapterManifest) -> None:
    manifest.lora.alpha = 0


def _rank(manifest: adapter_pb2.AdapterManifest) -> None:
    manifest.lora.rank = 1 << 30


def _base(manifest: adapter_pb2.AdapterManifest) -> None:
    manifest.base_fingerprint = "other"


def _count(manifest: adapter_pb2.AdapterManifest) -> None:
    manifest.tensor_count = 3


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (_total, "total_bytes"),
        (_size, "size_bytes"),
        (_offset, "offset_bytes"),
        (_name_twice, "name"),
        (_name, "digest"),
        (_alias, "tensor"),
        (_shape, "shape"),
        (_tensor_digest, "digest"),
        (_digest, "digest"),
        (_alpha, "alpha"),
        (_rank, "digest"),
        (_base, "base_fingerprint"),
        (_count, "tensor_count"),
    ],
)
async def test_a_manifest_that_lies_is_refused_before_a_byte(
    lie: Callable[[adapter_pb2.AdapterManifest], None], reason: str, pair: LiedTo
) -> None:
    """faults.md 14 and 26, verl#5325, dynamo#8630."""
    _, events = pair.next_update()
    lie(events[0].manifest)
    await _is_refused(pair, events, reason)


@pytest.mark.parametrize(
    ("manifest_of", "reason"),
    [
        (lambda m: dataclasses.replace(m, base_fingerprint="other"), "base_fingerprint"),
        (
            lambda m: dataclasses.replace(m, lora=dataclasses.replace(m.lora, rank=16)),
            "rank",
        ),
    ],
)
async def test_an_honest_manifest_that_does_not_fit_is_refused(
    manifest_of: Callable[[Manifest], Manifest], reason: str, pair: LiedTo
) -> None:
    """faults.md 8, vllm#55193: and what follows it on the stream is skipped."""
    ref, manifest, buffer = pair.next_version()
    other = manifest_of(manifest)
    ref = dataclasses.replace(ref, digest=other.digest())
    await _is_refused(pair, list(update_events(ref, other, buffer)), reason)


async def test_an_update_above_the_cap_is_refused_before_memory_is_taken(pair: LiedTo) -> None:
    """faults.md 27: `max_update_bytes` is a megabyte here; the manifest is true to its bytes."""
    manifest, _ = sized_adapter(pair.fingerprint, seed=0, width=1 << 14)
    pair.spent += 1
    ref = AdapterRef("run", "default", pair.spent, manifest.digest())
    first, _ = manifest_to_proto(ref, manifest)
    await _is_refused(pair, [Event(manifest=first)], "max_update_bytes")


async def _is_refused(pair: LiedTo, events: list[Event], reason: str) -> None:
    streams = pair.liar.streams
    async with called(pair.replica, pair.refs):
        pair.send(events)
        report = await pair.heard()
        assert report.outcome == adapter_pb2.OUTCOME_REFUSED
        assert report.stage == adapter_pb2.UPDATE_STAGE_MANIFEST
        assert reason in report.reason
        assert await pair.replica.listing() == pair.refs[-2:]
        await pair.commit_next()
    assert pair.liar.streams == streams
