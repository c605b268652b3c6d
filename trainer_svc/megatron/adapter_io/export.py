"""The trained adapter as PEFT tensors in one flat buffer."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from common.adapter import Dtype, Layout, LoraConfig, Manifest, TensorEntry, TensorSpec, plan, seal
from common.errors import StagingFull
from common.peft_dir import write_peft_dir
from trainer_svc.megatron import parallel
from trainer_svc.megatron.lora.layers import LoraLinear, lora_modules
from trainer_svc.megatron.model import names
from trainer_svc.megatron.settings import LoraSettings

TORCH_DTYPES = {
    Dtype.FLOAT32: torch.float32,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT16: torch.float16,
}
_WIRE_DTYPES = {value: key for key, value in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """One PEFT tensor, gathered over the tensor-parallel ranks."""

    name: str
    layout: Layout
    tensor: Tensor
    alias_of: str = ""


def export_to_file(
    model: GPTModel,
    path: Path,
    *,
    settings: LoraSettings,
    base_fingerprint: str,
    dtype: Dtype | None = None,
) -> Manifest | None:
    """Write the adapter's flat buffer as file `path` on rank 0; every rank must call this.

    Tensors are cast to `dtype` by one rounding, or keep the adapter's own type. The model is only
    read.

    Returns:
        The manifest of the file's bytes on rank 0, None elsewhere.

    Raises:
        StagingFull: the file system has no room.
    """
    tensors = whole_tensors(model)
    if torch.distributed.get_rank() != 0:
        return None
    manifest = _plan(tensors, settings=settings, base_fingerprint=base_fingerprint, dtype=dtype)
    with _mapped(path, size_bytes=manifest.total_bytes) as buffer:
        write_tensors(tensors, manifest=manifest, buffer=buffer)
        return replace(manifest, tensors=seal(manifest.tensors, buffer))


def export_to_peft_dir(model: GPTModel, path: Path, *, settings: LoraSettings) -> None:
    """Write the adapter, bit for bit, as a PEFT directory on rank 0; every rank must call this."""
    tensors = whole_tensors(model)
    if torch.distributed.get_rank() == 0:
        manifest = _plan(tensors, settings=settings, base_fingerprint="", dtype=None)
        buffer = memoryview(bytearray(manifest.total_bytes))
        write_tensors(tensors, manifest=manifest, buffer=buffer)
        write_peft_dir(path, manifest, buffer)


@torch.no_grad()
def whole_tensors(model: GPTModel) -> list[WholeTensor]:
    """Every PEFT tensor of the adapter, in walking order; every rank must call this.

    A fused projection has one A: its first projection owns it, the others are aliases.
    """
    config = model.config
    heads = names.Heads(config.num_attention_heads, config.num_query_groups, config.kv_channels)
    tensors: list[WholeTensor] = []
    for layer, linear, module in lora_modules(model):
        a, b = gather(linear, module)
        first = names.peft_name(layer, names.LINEARS[linear][0], "lora_A")
        rows = names.split(linear, b, heads=heads)
        for projection, part in zip(names.LINEARS[linear], rows, strict=True):
            a_name = names.peft_name(layer, projection, "lora_A")
            b_name = names.peft_name(layer, projection, "lora_B")
            tensors.append(WholeTensor(a_name, Layout.LORA_A, a, "" if a_name == first else first))
            tensors.append(WholeTensor(b_name, Layout.LORA_B, part))
    return tensors


def gather(linear: str, module: LoraLinear) -> tuple[Tensor, Tensor]:
    """Whole A (rank, in) and B (out, rank) of one fused linear, B in Megatron's row order."""
    if module.row_parallel:
        return torch.cat(parallel.gather_tp(module.lora_a), dim=1), module.lora_b
    return module.lora_a, names.join_rows(linear, parallel.gather_tp(module.lora_b))


def write_tensors(
    tensors: Sequence[WholeTensor], *, manifest: Manifest, buffer: memoryview
) -> None:
    """Copy every tensor that owns bytes to its place in the flat buffer."""
    by_name = {whole.name: whole.tensor for whole in tensors}
    for spec in manifest.tensors:
        if not spec.alias_of:
            _view(spec, buffer).copy_(by_name[spec.name].detach())


def _view(spec: TensorSpec, buffer: memoryview) -> Tensor:
    flat = torch.frombuffer(
        buffer[spec.offset_bytes : spec.end_bytes], dtype=TORCH_DTYPES[spec.dtype]
    )
    return flat.view(spec.shape)


def _plan(
    tensors: Sequence[WholeTensor],
    *,
    settings: LoraSettings,
    base_fingerprint: str,
    dtype: Dtype | None,
) -> Manifest:
    entries = [
        TensorEntry(
            whole.name,
            dtype or _WIRE_DTYPES[whole.tensor.dtype],
            tuple(whole.tensor.shape),
            whole.layout,
            whole.alias_of,
        )
        for whole in tensors
    ]
    projections = {whole.name.split(".")[-3] for whole in tensors}
    lora = LoraConfig(
        rank=settings.rank,
        alpha=settings.alpha,
        target_modules=tuple(sorted(projections)),
        use_rslora=settings.use_rslora,
    )
    return Manifest(base_fingerprint, lora, plan(entries))


@contextmanager
def _mapped(path: Path, *, size_bytes: int) -> Iterator[memoryview]:
    """A new file of exactly `size_bytes`, writable as memory.

    The blocks are reserved first: on a full tmpfs, writing to a hole would be a SIGBUS.
    """
    with path.open("w+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise StagingFull(
                f"{path}: an export needs {size_bytes} bytes, more than are free; "
                "enlarge the file system or keep fewer versions"
            ) from error
        with mmap.mmap(file.fileno(), size_bytes) as mapped, memoryview(mapped) as view:
            yield view
