"""Tensors that lie over ranks, in Megatron's distributed checkpoint format (`torch_dist`).

A tensor is stored whole, under a name that says nothing of ranks, so it loads under any layout.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor, load
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.serialization import (
    get_default_save_common_strategy,
    load_common_state_dict,
    load_tensors_metadata,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from common.errors import CheckpointFailed, ConfigError
from trainer_svc.megatron.agreement import together
from trainer_svc.megatron.model.shard import Shard

_WAY_OUT = "remove it, and --resume takes the one before"

_FORMAT = CheckpointingConfig("torch_dist")
_COMMON = "common"
_RNG = "rng"
_DAMAGED = (
    OSError,
    EOFError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)
"""What reading a file that is not what it should be raises."""


@dataclass(frozen=True, slots=True)
class Part:
    """What this rank, `rank` of the `size` that share it, holds of one tensor."""

    key: str
    value: Tensor
    shard: Shard
    rank: int
    size: int

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the tensor over all ranks."""
        shape = list(self.value.shape)
        if self.shard.dim is not None:
            shape[self.shard.dim] *= self.size
        return tuple(shape)

    def split(self, value: Tensor, *, is_main: bool) -> dict[int, ShardedTensor]:
        """Megatron's view of `value`, shaped as this part: one contiguous range a block."""
        dim, blocks = self.shard.dim, self.shard.blocks
        if dim is None:
            return {0: ShardedTensor.from_rank_offsets(self.key, value, replica_id=not is_main)}
        return {
            block: ShardedTensor.from_rank_offsets(
                self.key,
                part.contiguous(),
                (dim, block * self.size + self.rank, blocks * self.size),
                replica_id=not is_main,
            )
            for block, part in enumerate(value.chunk(blocks, dim))
        }

    def join(self, ranges: Mapping[int, Tensor]) -> Tensor:
        """Inverse of `split`."""
        parts = [ranges[block] for block in sorted(ranges)]
        return parts[0] if self.shard.dim is None else torch.cat(parts, self.shard.dim)


class _InProcess(SaveShardedStrategy):  # type: ignore[misc]
    """Megatron's format, written by the rank itself.

    Megatron's own strategy forks a writer, which copies every thread's locks, needs CUDA, and is
    waited for without an end where it is killed. This one tells every rank of each one's failure.
    """

    can_handle_sharded_objects = True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        save(
            mcore_to_pyt_state_dict(flat),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save_parts(path: Path, parts: Sequence[Part], *, common: Any, rng: Any) -> None:
    """Write all ranks' parts into the empty directory `path`; every rank must call this.

    Where several ranks hold a part, the first of them writes it.

    Args:
        common: plain values, the same on every rank.
        rng: this rank's own state.

    Raises:
        CheckpointFailed: on every rank, if one could not write.
    """
    mains = _first_held(parts)
    state = {
        "tensors": {p.key: p.split(p.value, is_main=m) for p, m in zip(parts, mains, strict=True)},
        _RNG: _rng_object(rng),
        _COMMON: common,
    }
    sharded, plain = save_preprocess(state)
    together(lambda: _save_plain(path, plain))
    try:
        _InProcess(_FORMAT.sharded_backend, _FORMAT.sharded_backend_version).save(
            sharded, str(path)
        )
    except CheckpointException as error:
        raise CheckpointFailed(
            f"{_told(path, error)}; the one before is kept; make room for another"
        ) from error


def read_common(path: Path) -> Any:
    """What `save_parts` was given as `common`.

    Raises:
        ConfigError: `path` holds no whole state.
    """
    try:
        (path / COMMON_STATE_FNAME).stat()  # of its absence Megatron tells badly
        return load_common_state_dict(str(path))[_COMMON]
    except (CheckpointingException, *_DAMAGED) as error:
        raise ConfigError(
            f"checkpoint: {path} is damaged or none ({_line(error)}); {_WAY_OUT}"
        ) from error


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Whole shape of every stored tensor, by key.

    Raises:
        ConfigError: `path` holds no whole state.
    """
    try:
        stored = load_tensors_metadata(str(path))
    except (CheckpointException, CheckpointingException, *_DAMAGED) as error:
        raise ConfigError(f"checkpoint: {path} is damaged ({_line(error)}); {_WAY_OUT}") from error
    return {key: tuple(tensor.global_shape) for key, tensor in stored.items()}


def load_parts(
    path: Path, parts: Sequence[Part], *, with_rng: bool
) -> tuple[dict[str, Tensor], Any]:
    """This rank's parts by key, and its random state if asked for; every rank must call this.

    The parts' values say only what is wanted, and are left as they are. `with_rng` needs as many
    ranks as saved.

    Raises:
        ConfigError: on every rank, if a file is missing or damaged.
    """
    wanted = {p.key: p.split(torch.empty_like(p.value, device="cpu"), is_main=True) for p in parts}
    state: dict[str, Any] = {"tensors": wanted}
    if with_rng:
        state[_RNG] = _rng_object(None)
    try:
        found = load(state, str(path), validate_access_integrity=False)
    except CheckpointException as error:
        raise ConfigError(f"{_told(path, error)}; {_WAY_OUT}") from error
    return {p.key: p.join(found["tensors"][p.key]) for p in parts}, found.get(_RNG)


def _first_held(parts: Sequence[Part]) -> list[bool]:
    """Whether this rank is the first of those that hold the same part."""
    places = [(p.key, p.rank if p.shard.dim is not None else 0) for p in parts]
    everyone: list[list[tuple[str, int]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, places)
    earlier = {place for others in everyone[: dist.get_rank()] for place in others}
    return [place not in earlier for place in places]


def _rng_object(value: Any) -> ShardedObject:
    return ShardedObject(_RNG, value, (dist.get_world_size(),), (dist.get_rank(),))


def _save_plain(path: Path, plain: Any) -> None:
    if dist.get_rank() != 0:
        return
    try:
        get_default_save_common_strategy().save_common(plain, str(path))
        save_config(_FORMAT, str(path))
    except (OSError, RuntimeError) as error:  # torch's zip writer raises the latter
        raise CheckpointFailed(
            f"checkpoint: rank 0 failed at {path} ({_line(error)}); the one before is kept; make "
            "room for another"
        ) from error


def _told(path: Path, error: CheckpointException) -> str:
    """On the first rank that failed."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return f"checkpoint: rank {rank} failed at {path} ({_line(cause)})"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
