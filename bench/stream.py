"""How fast one replica takes adapters, against one blob over the same gRPC stack."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import uvloop

from bench.blob import serve_blob
from bench.fleet_of import Publications, replicas, trainer
from bench.report import Goal, Report, Row, arguments
from bench.shapes import MIXTURE, QWEN3_8B, SMALL, Shape
from trainer_svc.config import ServerSettings

_DEADLINE_SECONDS = 120.0
_BOUND = 1 / 0.8
"""Refit's time over the blob's: at least 80 % of its speed."""


def main() -> None:
    args = arguments(__doc__)
    shapes = (SMALL, QWEN3_8B) if args.quick else (SMALL, QWEN3_8B, MIXTURE)
    repeats = 2 if args.quick else 5
    uvloop.install()
    rows = asyncio.run(_measure(shapes, repeats=repeats))
    goals = [
        Goal(f"{row['adapter']}: time over the blob's", float(row["ratio"]), _BOUND) for row in rows
    ]
    Report("stream", 0, repeats, rows, goals).publish(args.json)


async def _measure(shapes: tuple[Shape, ...], *, repeats: int) -> list[Row]:
    """Contenders by turns, so that what else the machine does hits both."""
    rows: list[Row] = []
    for shape in shapes:
        blob_seconds, wire_seconds, stage_seconds = [], [], []
        manifest, first = shape.filled(seed=0)
        server = await serve_blob(first)
        settings = ServerSettings(port=0, keep_versions=1, delta="never")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as staging:
            async with trainer(settings) as node:
                publications = Publications(node, count=1)
                node.fleet.require(manifest)
                async with replicas(node, 1, staging=Path(staging)):
                    await publications.publish(manifest, first)
                    for repeat in range(repeats):
                        blob_seconds.append(await _blob_seconds(server.address, len(first)))
                        version = await asyncio.to_thread(shape.filled, seed=1 + repeat)
                        [replica] = await publications.publish(*version)
                        wire_seconds.append(replica.timings.wire_seconds)
                        stage_seconds.append(replica.timings.stage_seconds)
        await server.stop(0)
        rows.append(_row(shape.name, len(first), blob_seconds, wire_seconds, stage_seconds))
    return rows


async def _blob_seconds(address: str, size_bytes: int) -> float:
    command = [sys.executable, "-m", "bench.blob", address, str(size_bytes)]
    done = await asyncio.to_thread(
        subprocess.run, command, stdout=subprocess.PIPE, check=True, timeout=_DEADLINE_SECONDS
    )
    return float(done.stdout)


def _row(
    name: str, size_bytes: int, blob: list[float], wire: list[float], stage: list[float]
) -> Row:
    whole = [w + s for w, s in zip(wire, stage, strict=True)]
    mib = size_bytes / (1 << 20)
    return {
        "adapter": name,
        "MiB": mib,
        "blob MiB/s": mib / median(blob),
        "Refit MiB/s": mib / median(whole),
        "slowest MiB/s": mib / max(whole),
        "wire s": median(wire),
        "stage s": median(stage),
        "ratio": median(whole) / median(blob),
    }


if __name__ == "__main__":
    main()
