"""Checkpoints: all that training goes on from, under any parallel layout.

step-000100/
  adapter/   the adapter that trains, a PEFT directory
  state/     every adapter, the optimizer and the caller's state, in Megatron's format
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from common.errors import CheckpointFailed, ConfigError, Incompatible, RefitError
from trainer_svc.megatron import parallel, rng
from trainer_svc.megatron.agreement import together
from trainer_svc.megatron.checkpoint_dir import CheckpointDir, writing
from trainer_svc.megatron.engine import MegatronTrainer
from trainer_svc.megatron.lora.layers import trained_tensors
from trainer_svc.megatron.lora.plan import AdapterPlan
from trainer_svc.megatron.lora.policies import DEFAULT, REFERENCE
from trainer_svc.megatron.sharded_state import (
    Part,
    load_parts,
    read_common,
    save_parts,
    stored_shapes,
)
from trainer_svc.megatron.training.optimizer import OptimizerState, TensorState

ADAPTER_DIR = "adapter"
STATE_DIR = "state"

_MASTER = "master"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save_checkpoint(trainer: MegatronTrainer, path: Path, *, state: dict[str, Any]) -> None:
    """Write a checkpoint; it appears under `path` whole or not at all. Every rank must call this.

    Args:
        path: on a file system that all ranks share.
        state: the caller's own, plain JSON values; `load_checkpoint` gives them back.

    Raises:
        CheckpointFailed: on every rank, if one could not write. What lay under `path` still does.
    """
    directory = CheckpointDir(path)
    inside = directory.partial / STATE_DIR
    try:
        together(_leader(lambda: _begin(directory)))
        together(lambda: _check_shared(inside))
        together(lambda: _export(trainer, directory))
        save_parts(
            inside,
            list(_parts(trainer).values()),
            common=_common(trainer) | {"state": state},
            rng=rng.state(),
        )
        together(_leader(directory.publish))
    except RefitError:
        together(_leader(directory.discard))
        raise


def load_checkpoint(trainer: MegatronTrainer, path: Path) -> dict[str, Any]:
    """Go on where `save_checkpoint` left off; the caller's state. Every rank must call this.

    Named adapters come back as well. Random numbers go on where the ranks are laid out as they
    were; under another layout they start anew, the same whenever this checkpoint is loaded so.

    Raises:
        ConfigError: no whole checkpoint lies there.
        Incompatible: its adapter does not fit the trainer's.
    """
    together(_leader(CheckpointDir(path).recover))
    common = together(lambda: _read(path / STATE_DIR))
    for name in common["adapters"]:
        if name not in trainer.policies.names:
            trainer.policies.add_adapter(name)
    parts = {k: p for k, p in _parts(trainer).items() if k.partition(".")[0] in common["adapters"]}
    wanted = parallel.gather_objects({key: part.whole_shape for key, part in parts.items()})
    together(lambda: _check_fit(path, common, trainer.plan, wanted))
    same_layout = common["layout"] == _layout(trainer)
    found, numbers = load_parts(path / STATE_DIR, list(parts.values()), with_rng=same_layout)
    _restore(trainer, found, common)
    if same_layout:
        rng.set_state(numbers)
    else:
        rng.seed(trainer.settings.seed, updates=trainer.optimizer.updates)
    state: dict[str, Any] = common["state"]
    return state


def _parts(trainer: MegatronTrainer) -> dict[str, Part]:
    """What this rank holds of every adapter and of the optimizer's moments, by key."""
    parts = {}
    moments = trainer.optimizer.state().tensors
    for adapter in trainer.policies.names:
        if adapter == REFERENCE:
            continue
        masters = trainer.policies.masters(adapter)
        for tensor in trained_tensors(trainer.base.chunks, adapter=adapter):
            values = {_MASTER: masters[tensor.name]}
            if adapter == DEFAULT:
                values |= {moment: getattr(moments[tensor.name], moment) for moment in _MOMENTS}
            for kind, value in values.items():
                key = _key(adapter, tensor.name, kind)
                rank, size = tensor.group.rank(), tensor.group.size()
                parts[key] = Part(key, value, tensor.shard, rank=rank, size=size)
    return parts


def _key(adapter: str, tensor: str, kind: str) -> str:
    return f"{adapter}.{tensor}.{kind}"


def _common(trainer: MegatronTrainer) -> dict[str, Any]:
    """What every rank knows."""
    return {
        "updates": trainer.optimizer.updates,
        "layout": _layout(trainer),
        "scales": _scales(trainer.plan),
        "adapters": [name for name in trainer.policies.names if name != REFERENCE],
    }


def _layout(trainer: MegatronTrainer) -> dict[str, Any]:
    return trainer.settings.parallel.model_dump() | {"world_size": dist.get_world_size()}


def _scales(plan: AdapterPlan) -> dict[str, float]:
    return {f"{site.name}.{number}": pair.scale for site, number, pair in plan.pairs()}


def _restore(trainer: MegatronTrainer, found: Mapping[str, Tensor], common: Any) -> None:
    """Set optimizer and adapters; one that the checkpoint lacks starts as a copy of `default`."""
    names = [tensor.name for tensor in trained_tensors(trainer.base.chunks)]

    def of(name: str, kind: str) -> Tensor:
        return found[_key(DEFAULT, name, kind)]

    tensors = {n: TensorState(of(n, _MASTER), *(of(n, m) for m in _MOMENTS)) for n in names}
    trainer.optimizer.load_state(OptimizerState(common["updates"], tensors))
    for adapter in trainer.policies.names:
        if adapter in (DEFAULT, REFERENCE):
            continue
        if adapter in common["adapters"]:
            values = {name: found[_key(adapter, name, _MASTER)] for name in names}
            trainer.policies.set_values(adapter, values)
        else:
            trainer.policies.copy_adapter(DEFAULT, adapter)


def _check_fit(
    path: Path, common: Any, plan: AdapterPlan, wanted: list[dict[str, tuple[int, ...]]]
) -> None:
    """Every stored tensor is wanted by some rank, every wanted one is stored, as it is wanted."""
    stored = stored_shapes(path / STATE_DIR)
    shapes = {key: shape for of_rank in wanted for key, shape in of_rank.items()}
    if odd := sorted(stored.keys() ^ shapes.keys()):
        side = "lacks" if odd[0] in shapes else "has the unknown"
        raise Incompatible(
            f"checkpoint: {path} {side} {odd[0]} ({len(odd)} tensors differ); set lora.type, "
            "lora.experts and lora.target_modules as they were"
        )
    for key, shape in shapes.items():
        if stored[key] != shape:
            raise Incompatible(
                f"checkpoint: {key} has shape {stored[key]} in {path}, and {shape} in the model; "
                "set lora.rank and lora.rank_pattern as they were, on the same base"
            )
    for pair, scale in _scales(plan).items():
        if common["scales"][pair] != scale:
            raise Incompatible(
                f"checkpoint: {pair} has scale {common['scales'][pair]} in {path}, and {scale} by "
                "the settings; set lora.alpha, lora.alpha_pattern and lora.use_rslora as they were"
            )


def _leader(act: Callable[[], None]) -> Callable[[], None]:
    """The same on rank 0, nothing elsewhere."""
    return act if dist.get_rank() == 0 else lambda: None


def _begin(directory: CheckpointDir) -> None:
    directory.begin()
    with writing(directory.path):
        (directory.partial / STATE_DIR).mkdir()


def _check_shared(inside: Path) -> None:
    """A rank on another machine would write its part where nobody looks for it."""
    if not inside.is_dir():
        raise CheckpointFailed(
            f"checkpoint: rank {dist.get_rank()} does not see {inside}, which rank 0 made; put "
            "run_dir on a file system that all ranks share"
        )


def _export(trainer: MegatronTrainer, directory: CheckpointDir) -> None:
    with writing(directory.path):
        trainer.exporter.to_peft_dir(directory.partial / ADAPTER_DIR)


def _read(inside: Path) -> Any:
    if not inside.is_dir():
        raise ConfigError(f"checkpoint: found no {inside}; give a directory that save made")
    return read_common(inside)
