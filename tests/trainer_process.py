"""A trainer as a process of its own that does not train: `python -m tests.trainer_process`.

Arguments are `model=DIR`, `run_id=NAME` and `KEY=VALUE` settings of `ServerSettings`. Each line
`VERSION SEED WIDTH` of its input publishes `sized_adapter` of these.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
from pathlib import Path

import uvloop

from common.adapter import Manifest
from common.config import load_config
from common.model_dir import base_model
from common.tasks import cancel, stop_requested
from tests.large_adapters import make_large
from trainer_svc.config import ServerSettings
from trainer_svc.control import RunControl
from trainer_svc.node import Node, serve_node


def sized_adapter(fingerprint: str, *, seed: int, width: int) -> tuple[Manifest, memoryview]:
    """Four tensors, 64 bytes a `width`, for the base model with this fingerprint."""
    manifest, buffer = make_large(width=width, seed=seed)
    return dataclasses.replace(manifest, base_fingerprint=fingerprint), buffer


async def serve(settings: ServerSettings, *, model: Path, run_id: str) -> None:
    stop = stop_requested()
    control = RunControl(run_id, steps_total=0)
    async with serve_node(settings, base=base_model(model), control=control, engine="") as node:
        task = asyncio.ensure_future(_publish_what_is_asked_for(node))
        await stop.wait()
        await cancel(task)


async def _publish_what_is_asked_for(node: Node) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    async for line in reader:
        version, seed, width = map(int, line.split())
        manifest, buffer = sized_adapter(node.base.fingerprint, seed=seed, width=width)
        node.fleet.require(manifest)
        node.publisher.publish("default", manifest, buffer, version=version)
        await node.ready()


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    overrides = dict(argument.split("=", 1) for argument in sys.argv[1:])
    model, run_id = Path(overrides.pop("model")), overrides.pop("run_id")
    settings = load_config(ServerSettings, None, overrides)
    uvloop.run(serve(settings, model=model, run_id=run_id))


if __name__ == "__main__":
    main()
