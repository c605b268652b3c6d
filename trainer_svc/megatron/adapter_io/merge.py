"""The whole model with an adapter merged into it, gathered tensor by tensor on rank 0."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from common.adapter import Dtype, Kind, Layout, Manifest, TensorEntry, plan, seal
from trainer_svc.megatron import device, parallel
from trainer_svc.megatron.adapter_io.flat import (
    TORCH_DTYPES,
    WIRE_DTYPES,
    mapped_file,
    tensors_of,
)
from trainer_svc.megatron.lora.layers import LoraLinear, merged_weight, wrapped_linears
from trainer_svc.megatron.model import names
from trainer_svc.megatron.model.base_config import BaseConfig, Heads
from trainer_svc.megatron.model.build import BaseModel
from trainer_svc.megatron.model.linears import Split
from trainer_svc.megatron.model.names import Stored
from trainer_svc.megatron.model.weights import named_tensors


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One Megatron parameter of the whole model, and the ranks that send its parts, in order."""

    name: str
    stored: Stored
    ranks: tuple[int, ...]
    part_shape: tuple[int, ...]
    dtype: Dtype

    def entries(self, heads: Heads) -> Iterator[TensorEntry]:
        """The Hugging Face tensors that it consists of."""
        whole = list(self.part_shape)
        if self.stored.split is not Split.NONE:
            whole[1 if self.stored.split is Split.COLUMNS else 0] *= len(self.ranks)
        parts = names.split(self.stored.fusion, torch.empty(whole, device="meta"), heads=heads)
        for name, part in zip(self.stored.names, parts, strict=True):
            yield TensorEntry(name, self.dtype, tuple(part.shape), Layout.WEIGHT)


class MergedExporter:
    """Exports the model with an adapter in it. Every rank makes one and calls it in step.

        exporter = MergedExporter(base)
        manifest = exporter.to_file(path, base_fingerprint=fingerprint)

    Rank 0 writes each rank's part of each parameter straight into the buffer, so that no rank holds
    more than one parameter above its own share of the model. Every weight is a sum in float32 from
    the pristine base, rounded once to the base's type; the model is only read.
    """

    def __init__(self, base: BaseModel) -> None:
        self._base = base.config
        self._own = {
            name: tensor for chunk in base.chunks for name, tensor in _weights(chunk, base.config)
        }
        self._wrapped = {_weight_name(linear): linear for linear in wrapped_linears(base.chunks)}
        self._parameters = _find_parameters(self._own, self._base)

    def to_file(
        self, path: Path, *, base_fingerprint: str, adapter: str = "default"
    ) -> Manifest | None:
        """Write the merged model's flat buffer as file `path` on rank 0.

        Returns:
            The manifest of the file's bytes on rank 0, None elsewhere.

        Raises:
            StagingFull: the file system has no room; on rank 0 alone, after all have sent.
        """
        received = self._received(adapter)
        try:
            if dist.get_rank() != 0:
                return None
            heads = self._base.heads
            specs = plan(entry for p in self._parameters for entry in p.entries(heads))
            manifest = Manifest(base_fingerprint, None, specs, Kind.MERGED)
            with mapped_file(path, size_bytes=manifest.total_bytes) as buffer:
                tensors = tensors_of(specs, buffer)
                for parameter, index, part in received:
                    self._write(parameter, index, part, tensors)
                return replace(manifest, tensors=seal(specs, buffer))
        finally:
            # What is left is taken as well, so that no rank waits with what it sends.
            deque(received, maxlen=0)

    @torch.no_grad()
    def _received(self, adapter: str) -> Iterator[tuple[_Parameter, int, Tensor]]:
        """On rank 0 every part of every parameter; on others nothing, but they send theirs.

        All ranks walk the same list and send to rank 0 alone, so no two wait for each other.
        """
        own_rank = dist.get_rank()
        for parameter in self._parameters:
            for index, rank in enumerate(parameter.ranks):
                if rank == own_rank:
                    part = self._merged(parameter.name, adapter)
                    if own_rank == 0:
                        yield parameter, index, part.cpu()
                    else:
                        dist.send(part.contiguous(), dst=0)
                elif own_rank == 0:
                    yield parameter, index, _receive(parameter, rank).cpu()

    def _merged(self, name: str, adapter: str) -> Tensor:
        linear = self._wrapped.get(name)
        return (
            self._own[name].detach() if linear is None else merged_weight(linear, adapter=adapter)
        )

    def _write(
        self, parameter: _Parameter, index: int, part: Tensor, tensors: Mapping[str, Tensor]
    ) -> None:
        """Put one rank's part where it belongs in the Hugging Face tensors."""
        stored, size = parameter.stored, len(parameter.ranks)
        rows = size if stored.split is Split.ROWS else 1
        heads = self._base.heads
        own = Heads(heads.heads // rows, heads.groups // rows, heads.head_dim)
        dim = 1 if stored.split is Split.COLUMNS else 0
        for name, piece in zip(
            stored.names, names.split(stored.fusion, part, heads=own), strict=True
        ):
            tensors[name].chunk(size, dim)[index].copy_(piece)


def _weights(chunk: GPTModel, base: BaseConfig) -> Iterator[tuple[str, Tensor]]:
    """The base's own tensors under the names that they had before linears were wrapped."""
    for name, tensor in named_tensors(chunk, base):
        if ".adapters." not in name:
            yield name.replace(".base.", "."), tensor


def _weight_name(linear: LoraLinear) -> str:
    site = linear.site
    return names.module_name(site.layer, f"{site.linear.name.format(expert=linear.expert)}.weight")


def _find_parameters(own: Mapping[str, Tensor], base: BaseConfig) -> Sequence[_Parameter]:
    """Every parameter of the whole model once, in one order at every parallel layout.

    Of ranks that hold the same, the lowest sends it, with those that share it. A tied output layer
    is the embedding, and not sent again.
    """
    held = {name: _parameter(name, tensor, base) for name, tensor in own.items()}
    found: dict[str, _Parameter] = {}
    for of_rank in parallel.gather_objects(held):
        for name, parameter in of_rank.items():
            found.setdefault(name, parameter)
    by_stored: dict[tuple[str, ...], _Parameter] = {}
    for name in sorted(found, key=_natural):
        by_stored.setdefault(found[name].stored.names, found[name])
    return list(by_stored.values())


def _parameter(name: str, tensor: Tensor, base: BaseConfig) -> _Parameter:
    stored = names.stored(base, name)
    ranks = [dist.get_rank()]
    if stored.split is not Split.NONE:
        ranks = dist.get_process_group_ranks(
            parallel_state.get_expert_tensor_parallel_group()
            if stored.is_expert
            else parallel_state.get_tensor_model_parallel_group()
        )
    return _Parameter(name, stored, tuple(ranks), tuple(tensor.shape), WIRE_DTYPES[tensor.dtype])


def _receive(parameter: _Parameter, rank: int) -> Tensor:
    dtype = TORCH_DTYPES[parameter.dtype]
    part = torch.empty(parameter.part_shape, dtype=dtype, device=device.compute_device())
    dist.recv(part, src=rank)
    return part


def _natural(name: str) -> list[int | str]:
    """Numbers by their value: layer 10 after layer 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
