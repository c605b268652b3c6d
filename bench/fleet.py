"""One to sixteen replicas at once, with and without relays: throughput and trainer memory."""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import uvloop

from bench.fleet_of import Publications, replicas, trainer
from bench.report import Goal, Report, Row, arguments
from bench.shapes import QWEN3_8B, SMALL, Shape
from trainer_svc.config import ServerSettings

_MIB = 1 << 20
_MIB_A_SUBSCRIBER = 8
_FAN_OUT = 2


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one fleet: medians over repeats, but for the memory, which is the most."""

    replicas: int
    fan_out: int
    seconds: float
    adapter_mib: float
    trainer_sent_mib: float
    extra_memory_mib: float

    @property
    def mib_per_second(self) -> float:
        return self.replicas * self.adapter_mib / self.seconds

    def row(self) -> Row:
        return {
            "replicas": float(self.replicas),
            "fan-out": str(self.fan_out or "none"),
            "all have it, s": self.seconds,
            "total MiB/s": self.mib_per_second,
            "trainer sends, adapters": self.trainer_sent_mib / self.adapter_mib,
            "trainer's extra MiB": self.extra_memory_mib,
        }


def main() -> None:
    args = arguments(__doc__)
    shape, most = (SMALL, 4) if args.quick else (QWEN3_8B, 16)
    repeats = 2 if args.quick else 5
    uvloop.install()
    fleets = [(1, 0), (4, 0), (most, 0), (most, _FAN_OUT)]
    figures = [
        asyncio.run(_measure(shape, count=count, fan_out=fan_out, repeats=repeats))
        for count, fan_out in dict.fromkeys(fleets)
    ]
    one, *_, many, relayed = figures
    goals = [
        Goal(
            "one replica's throughput over that of all",
            one.mib_per_second / many.mib_per_second,
            1.0,
        ),
        Goal(
            "trainer's extra MiB",
            many.extra_memory_mib,
            many.adapter_mib + _MIB_A_SUBSCRIBER * most,
        ),
        Goal(
            "adapters the trainer sends with relays",
            relayed.trainer_sent_mib / relayed.adapter_mib,
            _FAN_OUT * 1.01,
        ),
    ]
    Report("fleet", 0, repeats, [f.row() for f in figures], goals).publish(args.json)


async def _measure(shape: Shape, *, count: int, fan_out: int, repeats: int) -> Figures:
    seconds, sent, extra = [], [], []
    settings = ServerSettings(port=0, keep_versions=1, delta="never", fan_out=fan_out)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as staging:
        async with trainer(settings) as node:
            publications = Publications(node, count=count)
            manifest, buffer = shape.filled(seed=0)
            node.fleet.require(manifest)
            async with replicas(node, count, staging=Path(staging)):
                await publications.publish(manifest, buffer)
                for repeat in range(repeats):
                    manifest, buffer = await asyncio.to_thread(shape.filled, seed=1 + repeat)
                    with PeakMemory() as memory:
                        begun = time.perf_counter()
                        fleet = await publications.publish(manifest, buffer)
                        seconds.append(time.perf_counter() - begun)
                    extra.append(memory.extra_bytes / _MIB)
                    direct = [r for r in fleet if r.subscription.parent is None]
                    sent.append(sum(r.wire_bytes for r in direct) / _MIB)
    adapter_mib = len(buffer) / _MIB
    return Figures(count, fan_out, median(seconds), adapter_mib, median(sent), max(extra))


class PeakMemory:
    """How far this process's resident memory rose inside the block."""

    extra_bytes = 0

    def __enter__(self) -> PeakMemory:
        # Linux: the high-water mark begins anew.
        Path("/proc/self/clear_refs").write_text("5")
        self._before = psutil.Process().memory_info().rss
        return self

    def __exit__(self, *_: object) -> None:
        status = Path("/proc/self/status").read_text()
        peak_kib = next(line.split()[1] for line in status.splitlines() if "VmHWM" in line)
        self.extra_bytes = max(0, int(peak_kib) * 1024 - self._before)


if __name__ == "__main__":
    main()
