"""An adapter from a PEFT directory back into the model: the inverse of an export."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from common.errors import Incompatible
from common.peft_dir import read_peft_dir
from trainer_svc.megatron import parallel
from trainer_svc.megatron.adapter_io.export import TORCH_DTYPES
from trainer_svc.megatron.lora.layers import LoraLinear, lora_modules
from trainer_svc.megatron.model import names
from trainer_svc.megatron.settings import LoraSettings


@torch.no_grad()
def load_adapter(model: GPTModel, path: Path, *, settings: LoraSettings) -> None:
    """Set every A and B of the model from a PEFT directory that has exactly these modules.

    Raises:
        ConfigError: a file is missing or malformed.
        Incompatible: rank, scale, modules or shapes differ from the model's, or the projections
            of a fused linear do not share their A.
    """
    tensors = _read(path, settings=settings)
    modules = list(lora_modules(model))
    _check_names(path, tensors, modules)
    config = model.config
    heads = names.Heads(config.num_attention_heads, config.num_query_groups, config.kv_channels)
    for layer, linear, module in modules:
        a_parts = _parts(tensors, layer, linear, "lora_A")
        if any(not torch.equal(a_parts[0], other) for other in a_parts[1:]):
            raise Incompatible(
                f"{path}: layer {layer} has a different A for each of "
                f"{', '.join(names.LINEARS[linear])}; a fused linear holds one, train from scratch"
            )
        fused = names.fuse(linear, _parts(tensors, layer, linear, "lora_B"), heads=heads)
        _assign(path, linear, module, a=a_parts[0], b=fused)


def _read(path: Path, *, settings: LoraSettings) -> dict[str, Tensor]:
    adapter = read_peft_dir(path, base_fingerprint="")
    lora = adapter.manifest.lora
    if lora.rank != settings.rank or lora.scale != settings.scale:
        raise Incompatible(
            f"{path}: the adapter has rank {lora.rank} and scale {lora.scale}, the settings "
            f"{settings.rank} and {settings.scale}; set lora.rank and lora.alpha to match"
        )
    data = bytearray(adapter.buffer)
    return {
        spec.name: torch.frombuffer(
            data,
            dtype=TORCH_DTYPES[spec.dtype],
            count=spec.size_bytes // spec.dtype.itemsize,
            offset=spec.offset_bytes,
        ).view(spec.shape)
        for spec in adapter.manifest.tensors
    }


def _check_names(
    path: Path, tensors: dict[str, Tensor], modules: list[tuple[int, str, LoraLinear]]
) -> None:
    wanted = {
        names.peft_name(layer, projection, matrix)
        for layer, linear, _ in modules
        for projection in names.LINEARS[linear]
        for matrix in ("lora_A", "lora_B")
    }
    if odd := sorted(wanted ^ tensors.keys()):
        side = "lacks" if odd[0] in wanted else "has the unknown"
        raise Incompatible(
            f"{path}: the adapter {side} {odd[0]} ({len(odd)} names differ); "
            "set lora.target_modules to match"
        )


def _parts(tensors: dict[str, Tensor], layer: int, linear: str, matrix: str) -> list[Tensor]:
    return [tensors[names.peft_name(layer, p, matrix)] for p in names.LINEARS[linear]]


def _assign(path: Path, linear: str, module: LoraLinear, *, a: Tensor, b: Tensor) -> None:
    rank, size = parallel.tp_rank(), parallel.tp_size()
    if module.row_parallel:
        a = a.chunk(size, dim=1)[rank]
    else:
        b = names.shard_rows(linear, b, rank=rank, size=size)
    for parameter, value in ((module.lora_a, a), (module.lora_b, b)):
        if parameter.shape != value.shape:
            raise Incompatible(
                f"{path}: {linear} has shape {tuple(value.shape)}, the model "
                f"{tuple(parameter.shape)}; use an adapter of this base model"
            )
        parameter.copy_(value)
