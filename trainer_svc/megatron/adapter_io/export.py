"""A trained adapter as PEFT tensors in one flat buffer, gathered from all ranks on rank 0."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from common.adapter import Dtype, LoraConfig, Manifest, TensorSpec, plan, seal
from common.peft_dir import write_peft_dir
from trainer_svc.megatron import device
from trainer_svc.megatron.adapter_io.flat import (
    WIRE_DTYPES,
    mapped_file,
    on_one_thread,
    tensors_of,
)
from trainer_svc.megatron.adapter_io.lora_config import exact_config, scale_ratio, uniform_config
from trainer_svc.megatron.adapter_io.places import Place, entries, pieces
from trainer_svc.megatron.adapter_io.reference import reference_buffer, reference_manifest
from trainer_svc.megatron.adapter_io.routes import Message, Part, find_messages
from trainer_svc.megatron.adapter_io.rows import own_part, split_part
from trainer_svc.megatron.lora.layers import lora_linears
from trainer_svc.megatron.lora.pair import B
from trainer_svc.megatron.lora.plan import AdapterPlan
from trainer_svc.megatron.model.build import BaseModel


@dataclass(frozen=True, slots=True)
class _Contents:
    """All of a manifest but base and digests."""

    lora: LoraConfig
    specs: tuple[TensorSpec, ...]
    ratios: Mapping[tuple[int, int], float]
    """By site and pair, what B is multiplied by."""


class AdapterExporter:
    """Exports the adapters of a model. Every rank makes one and calls the same methods in step.

        exporter = AdapterExporter(base, plan=plan)
        manifest = exporter.to_file(path, base_fingerprint=fingerprint, dtype=Dtype.BFLOAT16)

    Rank 0 writes what it gets straight into the buffer: it holds one adapter and one layer's parts.
    The model is only read.

    Raises:
        ConfigError: the adapter cannot lie in the expert layout of the settings.
    """

    def __init__(self, base: BaseModel, *, plan: AdapterPlan, base_model_name: str = "") -> None:
        self._plan, self._base, self._heads = plan, base.config, base.config.heads
        self._base_model_name = base_model_name
        self._linears = {linear.site_number: linear for linear in lora_linears(base.chunks)}
        self._messages = find_messages(plan, self._linears.values())
        self._pieces = pieces(plan, base.config, experts=plan.settings.expert_layout)
        self._own_dtype = WIRE_DTYPES[getattr(torch, plan.settings.dtype)]
        self._known: dict[tuple[Dtype, bool], _Contents] = {}

    def to_file(
        self,
        path: Path,
        *,
        base_fingerprint: str,
        dtype: Dtype | None = None,
        adapter: str = "default",
    ) -> Manifest | None:
        """Write one adapter, as replicas take it, as file `path` on rank 0.

        Where modules differ in scale, each B is brought to one, as `uniform_config` says. Tensors
        are cast to `dtype` by one rounding; without one they keep the settings' type.

        Returns:
            The manifest of the file's bytes on rank 0, None elsewhere.

        Raises:
            StagingFull: the file system has no room; on rank 0 alone, after all have sent.
        """
        contents = self._contents(dtype, exact=False)
        received = self._received(adapter)
        try:
            if dist.get_rank() != 0:
                return None
            manifest = Manifest(base_fingerprint, contents.lora, contents.specs)
            with mapped_file(path, size_bytes=manifest.total_bytes) as buffer:
                self._write(contents, received, buffer)
                return replace(manifest, tensors=seal(manifest.tensors, buffer))
        finally:
            _exhaust(received)

    def reference_to_file(
        self, path: Path, *, base_fingerprint: str, dtype: Dtype | None = None
    ) -> Manifest | None:
        """Write the base alone, as an adapter that changes nothing; as `to_file`."""
        if dist.get_rank() != 0:
            return None
        manifest = reference_manifest(
            self._plan,
            base=self._base,
            base_fingerprint=base_fingerprint,
            dtype=dtype or self._own_dtype,
        )
        with mapped_file(path, size_bytes=manifest.total_bytes) as buffer:
            buffer[:] = reference_buffer(manifest)
        return manifest

    def to_peft_dir(self, path: Path, *, adapter: str = "default") -> None:
        """Write one adapter, bit for bit, as a PEFT directory on rank 0."""
        contents = self._contents(None, exact=True)
        received = self._received(adapter)
        try:
            if dist.get_rank() == 0:
                manifest = Manifest("", contents.lora, contents.specs)
                buffer = memoryview(bytearray(manifest.total_bytes))
                self._write(contents, received, buffer)
                write_peft_dir(path, manifest, buffer, base_model=self._base_model_name)
        finally:
            _exhaust(received)

    def _contents(self, dtype: Dtype | None, *, exact: bool) -> _Contents:
        key = (dtype or self._own_dtype, exact)
        if key not in self._known:
            lora = (exact_config if exact else uniform_config)(self._plan, self._pieces)
            specs = plan(entries(self._pieces, dtype=key[0]))
            self._known[key] = _Contents(lora, specs, {} if exact else _ratios(self._plan))
        return self._known[key]

    def _received(self, adapter: str) -> Iterator[tuple[Part, Tensor]]:
        """On rank 0 every part, layer by layer; on others nothing, but they send theirs.

        It must come to its end: until then others wait.
        """
        own_rank = dist.get_rank()
        for message in self._messages:
            if message.rank == own_rank:
                tensors = [self._tensor(part, adapter) for part in message.parts]
                if own_rank == 0:
                    yield from zip(message.parts, _on_host(tensors), strict=True)
                else:
                    dist.send(_one(tensors), dst=0)
            elif own_rank == 0:
                yield from zip(message.parts, _receive(message), strict=True)

    def _tensor(self, part: Part, adapter: str) -> Tensor:
        pair = self._linears[part.site].pairs(adapter)[part.pair]
        tensor: Tensor = getattr(pair, part.leaf).detach()
        return tensor

    @on_one_thread()
    def _write(
        self, contents: _Contents, received: Iterator[tuple[Part, Tensor]], buffer: memoryview
    ) -> None:
        """Put every part where it belongs, which is one rounding where the types differ."""
        tensors = tensors_of(contents.specs, buffer)
        for part, value in received:
            ratio = contents.ratios.get((part.site, part.pair), 1.0)
            if part.leaf == B and ratio != 1.0:
                value = value.float() * ratio
            for place, rows in self._places(part, value):
                whole = place.view(tensors[place.name])
                self._own_part(part, whole).copy_(rows)

    def _places(self, part: Part, value: Tensor) -> Iterator[tuple[Place, Tensor]]:
        """Where a part goes, by projection, each place that is no alias with its rows."""
        site = self._plan.sites[part.site]
        by_projection = split_part(
            site, site.pairs[part.pair], part.leaf, value, size=part.size, heads=self._heads
        )
        own_pieces = self._pieces[part.site, part.pair, part.leaf]
        for piece, rows in zip(own_pieces, by_projection, strict=True):
            for place in piece.places:
                if not place.alias_of:
                    yield place, rows

    def _own_part(self, part: Part, piece: Tensor) -> Tensor:
        site = self._plan.sites[part.site]
        pair = site.pairs[part.pair]
        return own_part(site, pair, part.leaf, piece, index=part.index, size=part.size)


def _ratios(plan: AdapterPlan) -> dict[tuple[int, int], float]:
    return {
        (number, pair_number): scale_ratio(plan, pair)
        for number, site in enumerate(plan.sites)
        for pair_number, pair in enumerate(site.pairs)
    }


def _one(tensors: Sequence[Tensor]) -> Tensor:
    """One message: float32, which holds every type's values, whatever an adapter's type is."""
    return torch.cat([tensor.float().flatten() for tensor in tensors])


def _receive(message: Message) -> list[Tensor]:
    sizes = [math.prod(part.shape) for part in message.parts]
    flat = torch.empty(sum(sizes), dtype=torch.float32, device=device.compute_device())
    dist.recv(flat, src=message.rank)
    parts = torch.split(flat.cpu(), sizes)
    return [part.view(own.shape) for part, own in zip(parts, message.parts, strict=True)]


def _on_host(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors where the buffer is, in one copy."""
    if not tensors[0].is_cuda:
        return tensors
    parts = torch.split(_one(tensors).cpu(), [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _exhaust(received: Iterator[tuple[Part, Tensor]]) -> None:
    """Take what is left, so that no rank waits with what it sends."""
    for _ in received:
        pass
