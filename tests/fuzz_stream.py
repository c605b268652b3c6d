"""Mutated streams against the real receiver: `python -m tests.fuzz_stream --streams 100000`.

Streams of every encoding, sound ones and spoilt ones, are applied one after the other to the same
replica, all real but its engine. Whatever comes, only domain errors come out, within a second of
processor time; what is listed holds the bytes its digest names; directories, slots and memory level
off.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from blake3 import blake3
from refit.v1 import adapter_pb2
from safetensors import safe_open

from common.adapter import (
    AdapterRef,
    Dtype,
    ExpertLayout,
    Kind,
)
from common.errors import RefitError
from common.peft_dir import WEIGHTS_FILE
from common.stream.content import Content
from common.tasks import cancel
from rollout_svc.engine import BoundReport, Mismatch, MismatchReason
from rollout_svc.metrics import Metrics
from rollout_svc.updates.applier import UpdateApplier
from rollout_svc.updates.limits import Limits, Takes
from rollout_svc.updates.relay import Relay
from rollout_svc.versions.registry import AdapterRegistry
from tests.adapters import LORA
from tests.fake_engine import FakeEngine
from tests.fuzz_mutations import Stream, mutate
from tests.fuzz_trainer import FuzzTrainer
from tests.live import BASE, PRISTINE

SLOTS, KEEP_VERSIONS = 5, 2
CPU_SECONDS_A_STREAM = 1.0
SECONDS_A_STREAM = 30.0
"""For a machine on which others work as well: only a stream that hangs takes so long."""

MOST_GROWTH_BYTES = 100 << 20
LARGEST_ALLOCATION_BYTES = 256 << 20
_WARM_UP_STREAMS = 1000
_REFUSED = [BoundReport(0, 0, (Mismatch("a", MismatchReason.NO_MODULE),), "")]


@dataclass(slots=True)
class Replica:
    """The receiving side, and what must hold of it after every stream."""

    registry: AdapterRegistry
    engine: FakeEngine
    applier: UpdateApplier
    staging: Path
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_seconds: float = 0.0
    _checked: set[AdapterRef] = field(default_factory=set)

    async def take(self, stream: Stream) -> None:
        begun = time.process_time()
        try:
            async with asyncio.timeout(SECONDS_A_STREAM):
                for event in stream:
                    await self.applier.apply(event)
            self.outcomes["ended"] += 1
        except RefitError as error:
            self.outcomes[f"broke: {type(error).__name__}"] += 1
        self.applier.suspend()
        self.slowest_seconds = max(self.slowest_seconds, time.process_time() - begun)
        assert self.slowest_seconds < CPU_SECONDS_A_STREAM, f"{self.slowest_seconds:.2f} s"

    async def check(self, published: dict[AdapterRef, Content]) -> None:
        await self._settled()
        listed = self.registry.listing()
        for content in self.registry.contents():
            if content.ref not in self._checked:
                _check_bytes(content, self._path(content.ref), published.get(content.ref))
        assert listed or not self._checked, "nothing is served any more"
        self._checked = set(listed)
        paths = {live.loaded.path for live in self.registry.versions.all}
        half = self.applier._suspended
        found = {path for path in self.staging.iterdir()}
        assert len(found - paths) == (half is not None), f"left behind: {found - paths}"
        assert paths <= found
        assert {adapter.path for adapter in self.engine.loaded.values()} <= paths
        assert len(self.engine.loaded) <= SLOTS

    async def _settled(self) -> None:
        registry = self.registry
        assert await registry.uses.changed.wait_until(
            lambda: not any(live.retired for live in registry.versions.all),
            timeout_seconds=SECONDS_A_STREAM,
        )

    def _path(self, ref: AdapterRef) -> Path:
        return next(live.loaded.path for live in self.registry.versions.all if live.ref == ref)

    def check_all_bytes(self, published: dict[AdapterRef, Content]) -> None:
        """Nothing that came later has touched them."""
        for content in self.registry.contents():
            _check_bytes(content, self._path(content.ref), published.get(content.ref))


def _check_bytes(content: Content, path: Path, published: Content | None) -> None:
    """The file that the engine loads has, tensor by tensor, what the digest names."""
    manifest = content.manifest
    assert manifest.digest() == content.ref.digest
    if published is not None:
        assert published.manifest == manifest
        assert bytes(content.buffer) == bytes(published.buffer)
    with safe_open(path / WEIGHTS_FILE, framework="np") as file:
        assert set(file.keys()) == {spec.name for spec in manifest.tensors}
    data = (path / WEIGHTS_FILE).read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    end = begin + manifest.total_bytes
    for spec in manifest.tensors:
        at = end if spec.alias_of else begin + spec.offset_bytes
        end += spec.size_bytes if spec.alias_of else 0
        assert blake3(data[at : at + spec.size_bytes]).digest() == spec.digest, spec.name


@asynccontextmanager
async def open_replica(staging: Path) -> AsyncIterator[Replica]:
    engine = FakeEngine(slots=SLOTS)
    registry = AdapterRegistry(
        engine=engine,
        base=BASE,
        pristine=PRISTINE,
        slots=SLOTS,
        keep_versions=KEEP_VERSIONS,
        slot_wait_seconds=0.5,
    )
    limits = Limits(
        kinds=frozenset(Kind),
        dtypes=frozenset(Dtype),
        max_bytes=1 << 16,
        slots=Takes(
            target_modules=frozenset(LORA.target_modules),
            layouts=frozenset(ExpertLayout.PER_EXPERT.factors),
            max_rank=8,
        ),
    )
    applier = UpdateApplier(
        source="trainer",
        registry=registry,
        relay=Relay(registry=registry, max_children=1),
        limits=limits,
        staging=staging,
        metrics=Metrics(),
        report=_no_report,
    )
    unloading = asyncio.create_task(registry.run())
    try:
        yield Replica(registry, engine, applier, staging)
        applier.close()
    finally:
        await cancel(unloading)


async def _no_report(report: adapter_pb2.ReportAdapterRequest) -> None:
    report.SerializeToString()


async def fuzz(*, streams: int, seed: int, staging: Path) -> None:
    """Raises `AssertionError`, or whatever else came out, with the number of the stream."""
    rng = random.Random(seed)
    trainer = FuzzTrainer(rng)
    begun, before_bytes = time.monotonic(), 0
    async with open_replica(staging) as replica:
        for number in range(streams):
            if number == min(_WARM_UP_STREAMS, streams // 2):
                before_bytes = _rss_bytes()
                await _limit_memory()
            try:
                await _one(trainer, replica, rng)
            except BaseException as error:
                error.add_note(f"stream {number} of seed {seed}")
                raise
            if number % 1000 == 0:
                replica.check_all_bytes(trainer.published)
        growth_bytes = _rss_bytes() - before_bytes
        assert growth_bytes < MOST_GROWTH_BYTES, f"memory grew by {growth_bytes} bytes"
    seconds = time.monotonic() - begun
    print(f"{streams} streams in {seconds:.1f} s, {streams / seconds:.0f} a second, seed {seed}")
    print(f"slowest {replica.slowest_seconds:.3f} s of processor time")
    print(f"memory grew by {growth_bytes >> 10} KiB")
    for name in ("committed", "refused"):
        count = replica.applier.metrics.updates.labels(name)._value.get()
        print(f"updates {name}: {count:.0f}")
    print(*(f"{name}: {count}" for name, count in replica.outcomes.most_common()), sep="; ")


async def _one(trainer: FuzzTrainer, replica: Replica, rng: random.Random) -> None:
    held = replica.registry.listing()
    half = replica.applier._suspended
    partial = (half.ref, half.received_bytes) if half else (AdapterRef("", "", 0, b""), 0)
    stream = await trainer.sound_stream(held, partial)
    if rng.randrange(5):
        other = await trainer.sound_stream(held, partial) if not rng.randrange(8) else []
        stream = mutate(stream, rng, other=other)
    replica.engine.answers[:] = _REFUSED if not rng.randrange(20) else [BoundReport(0, 2, (), "")]
    await replica.take(stream)
    await replica.check(trainer.published)


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


async def _limit_memory() -> None:
    """From here on an allocation far above what an update may take is a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + LARGEST_ALLOCATION_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutated update streams against the receiver.")
    parser.add_argument("--streams", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as staging:
        uvloop.run(fuzz(streams=args.streams, seed=args.seed, staging=Path(staging)))


if __name__ == "__main__":
    main()
