"""`refit trainer`: the service, the Megatron ranks and the loop, started and ended together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from functools import partial
from pathlib import Path

import uvloop
from refit.v1 import trainer_pb2

from common.config import dump_toml
from common.errors import ConfigError
from common.model_dir import base_model
from common.tasks import cancel, first_of, stop_requested
from trainer_svc.config import TrainerConfig
from trainer_svc.control import RunControl
from trainer_svc.megatron.client import MegatronWorker
from trainer_svc.megatron.protocol import Sample
from trainer_svc.node import serve_node
from trainer_svc.rl.data import load_examples, load_function, skip
from trainer_svc.rl.loop import GrpoLoop, Parts
from trainer_svc.rl.prompts import PromptEncoder
from trainer_svc.rl.records import Records
from trainer_svc.rl.supervised import read_samples
from trainer_svc.run_dir import ADAPTER_DIR, RunDir
from trainer_svc.sources import MegatronSource

log = logging.getLogger(__name__)

SHM_DIR = Path("/dev/shm")
"""Memory shared with the ranks: holds one version for the moment between export and mapping."""


def main(config: TrainerConfig, *, resume: bool) -> None:
    """Train until done or told to stop. Raises `RefitError` for whatever the user can mend."""
    uvloop.run(_serve(config, resume=resume))


async def _serve(config: TrainerConfig, *, resume: bool) -> None:
    stop = stop_requested()
    # Everything that the user names is read first, so that a mistake shows now.
    _check(config)
    base = base_model(config.model)
    reward = load_function(config.rl.reward, field="rl.reward")
    lessons = await asyncio.to_thread(_lessons, config)
    open_run = RunDir.resume if resume else RunDir.create
    run_dir = open_run(config.run_dir, base_fingerprint=base.fingerprint)
    (run_dir.path / "config.toml").write_text(dump_toml(config), encoding="utf-8")
    control = RunControl(run_dir.run_id, steps_total=config.rl.steps)
    async with (
        serve_node(config.server, base=base, control=control, engine="megatron-core") as node,
        MegatronWorker(
            num_ranks=config.megatron.num_ranks, max_restarts=config.megatron.max_restarts
        ) as worker,
    ):
        source = _source(config, worker, base_fingerprint=base.fingerprint)
        with contextlib.closing(run_dir), contextlib.closing(Records(run_dir.path)) as records:
            parts = Parts(
                run_dir=run_dir,
                node=node,
                worker=worker,
                source=source(merged=config.merge == "trainer"),
                side_sources={name: source(adapter=name) for name in config.side_policies},
                examples=lambda start: skip(
                    load_examples(config.rl.data, seed=config.rl.seed), start
                ),
                lessons=lessons,
                reward=reward,
                encoder=await asyncio.to_thread(PromptEncoder, config.model),
                records=records,
            )
            await _train(config, parts, stop=stop)
            records.summarise()
        if config.serve_after_run:
            await stop.wait()


def _source(
    config: TrainerConfig, worker: MegatronWorker, *, base_fingerprint: str
) -> partial[MegatronSource]:
    """A source of whichever policy it is called for."""
    return partial(
        MegatronSource,
        worker,
        base_fingerprint=base_fingerprint,
        shm_dir=SHM_DIR,
        deadline_seconds=config.megatron.command_timeout_seconds,
        dtype=config.published_dtype,
    )


def _check(config: TrainerConfig) -> None:
    """Raises `ConfigError` for what can be seen to be wrong without a model."""
    config.server.security.check()
    config.megatron.parallel.check(num_ranks=config.megatron.num_ranks)
    load_examples(config.rl.data, seed=config.rl.seed)
    if config.adapter_path is not None and not config.adapter_path.is_dir():
        raise ConfigError(
            f"adapter_path: found no directory {config.adapter_path}; give a PEFT adapter or a "
            "checkpoint"
        )


def _lessons(config: TrainerConfig) -> list[Sample]:
    """What `sft.data` holds."""
    if config.sft.data is None:
        return []
    return read_samples(Path(config.sft.data), model_dir=config.model)


async def _train(config: TrainerConfig, parts: Parts, *, stop: asyncio.Event) -> None:
    """The run, until it is done or a signal comes; then its last adapter, where users look."""
    control = parts.node.control
    task = asyncio.ensure_future(GrpoLoop(config, parts).train())
    try:
        if not await first_of(stop, task):
            control.stopping = True
            if control.state == trainer_pb2.RUN_STATE_RUNNING:
                await asyncio.wait({task}, timeout=config.rl.stop_grace_seconds)
    finally:
        await cancel(task)
        control.ended(error=None if task.cancelled() else task.exception())
    if checkpoint := parts.run_dir.last_checkpoint():
        adapter = parts.run_dir.path / ADAPTER_DIR
        shutil.rmtree(adapter, ignore_errors=True)
        shutil.copytree(checkpoint[0] / "adapter", adapter)
        log.info("ended after step %d of %d: %s", control.step, config.rl.steps, adapter)
