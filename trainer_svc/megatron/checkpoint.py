"""Checkpoints: the adapter as a PEFT directory, each rank's optimizer and random state."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.errors import ConfigError
from trainer_svc.megatron.adapter_io.export import export_to_peft_dir
from trainer_svc.megatron.adapter_io.load import load_adapter
from trainer_svc.megatron.engine import MegatronTrainer

ADAPTER_DIR = "adapter"
STATE_FILE = "state.json"


def save_checkpoint(trainer: MegatronTrainer, path: Path, *, state: dict[str, Any]) -> None:
    """Write a checkpoint; it appears under `path` whole or not at all. Every rank must call this.

    Args:
        state: the caller's own, plain JSON values; `load_checkpoint` gives them back.
    """
    leader = dist.get_rank() == 0
    partial = path.with_name(f".{path.name}.partial")
    if leader:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        content = {"world_size": dist.get_world_size(), "state": state}
        (partial / STATE_FILE).write_text(json.dumps(content))
    dist.barrier()
    export_to_peft_dir(trainer.model, partial / ADAPTER_DIR, settings=trainer.settings.lora)
    torch.save(
        {"optimizer": trainer.optimizer.state_dict(), "rng": torch.get_rng_state()},
        partial / _rank_file(),
    )
    dist.barrier()
    if leader:
        _publish(partial, path)
    dist.barrier()


def load_checkpoint(trainer: MegatronTrainer, path: Path) -> dict[str, Any]:
    """Go on where `save_checkpoint` left off; the caller's state. Every rank must call this.

    Raises:
        ConfigError: no whole checkpoint lies there, or it is of another number of ranks.
        Incompatible: its adapter does not fit the trainer's.
    """
    file = path / STATE_FILE
    if not file.is_file():
        raise ConfigError(f"checkpoint: found no {file}; give a directory that save made")
    content = json.loads(file.read_text())
    if content["world_size"] != dist.get_world_size():
        raise ConfigError(
            f"checkpoint: {path} is of {content['world_size']} ranks, these are "
            f"{dist.get_world_size()}; start as many, or set adapter_path to {path / ADAPTER_DIR}"
        )
    load_adapter(trainer.model, path / ADAPTER_DIR, settings=trainer.settings.lora)
    own = torch.load(path / _rank_file(), weights_only=True)
    trainer.optimizer.load_state_dict(own["optimizer"])
    torch.set_rng_state(own["rng"])
    state: dict[str, Any] = content["state"]
    return state


def _rank_file() -> str:
    return f"rank_{dist.get_rank():05d}.pt"


def _publish(partial: Path, path: Path) -> None:
    """Rename into place, on disk first; an older checkpoint of that name makes way."""
    for file in partial.rglob("*"):
        _sync(file)
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
