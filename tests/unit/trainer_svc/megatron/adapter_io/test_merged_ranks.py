"""The merged model over two ranks, in every way to split it: the bytes of one rank."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import tiny_models
from tests.ranks import run_ranks
from trainer_svc.megatron import parallel
from trainer_svc.megatron.adapter_io.merge import MergedExporter
from trainer_svc.megatron.lora.layers import add_lora, trained_tensors
from trainer_svc.megatron.lora.plan import plan_adapter
from trainer_svc.megatron.lora.settings import LoraSettings
from trainer_svc.megatron.model.build import build_model
from trainer_svc.megatron.settings import ParallelSettings

NUM_LAYERS = 4
TENSOR = {"tensor_parallel_size": 2}
PIPELINE = {"pipeline_parallel_size": 2}
VIRTUAL = PIPELINE | {"virtual_pipeline_size": 2}
EXPERT = {"expert_parallel_size": 2}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama_tied", {}, TENSOR),
    ("llama_tied", {}, PIPELINE),
    ("qwen2", {"type": "canonical_lora"}, TENSOR),
    ("qwen2", {"type": "canonical_lora"}, VIRTUAL),
    ("llama", {"type": "dora"}, PIPELINE),
    ("qwen3_moe", {}, EXPERT),
    ("qwen3_moe", {}, TENSOR),
    ("qwen3_moe", {}, TENSOR | {"expert_tensor_parallel_size": 2}),
    ("mixtral", {"experts": "shared"}, EXPERT),
    ("deepseek_v3", {}, TENSOR | EXPERT),
    ("deepseek_v3", {}, VIRTUAL),
]


def export(model_dir: Path, lora: dict[str, Any], sizes: dict[str, Any], path: Path) -> bytes:
    """The digest of the merged model on rank 0, nothing elsewhere; values depend on names alone."""
    settings = ParallelSettings(**sizes)
    parallel.start(settings)
    base = build_model(model_dir, dtype=torch.bfloat16, parallel=settings)
    plan = plan_adapter(base.config, LoraSettings.model_validate({"rank": 4} | lora))
    add_lora(base, plan=plan, seed=5)
    for tensor in trained_tensors(base.chunks):
        generator = torch.Generator().manual_seed(zlib.crc32(tensor.name.encode()))
        whole = torch.randn(tensor.whole_shape, generator=generator)
        if tensor.name.endswith("magnitude"):
            whole.abs_().add_(1)
        rank, size = dist.get_rank(tensor.group), tensor.group.size()
        tensor.parameter.data.copy_(tensor.shard.part(whole, rank=rank, size=size))
    manifest = MergedExporter(base).to_file(path, base_fingerprint="base")
    return manifest.digest() if manifest else b""


def run_rank(root: Path) -> None:
    for number, (name, lora, sizes) in enumerate(CASES):
        digest = export(root / name, lora, sizes, root / "export")
        if dist.get_rank() == 0:
            expected = root / f"{number}.digest"
            assert digest == expected.read_bytes(), f"{name}, {lora}, {sizes}"


@pytest.mark.usefixtures("ranks")
def test_exports_of_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    for number, (name, lora, _) in enumerate(CASES):
        if not (tmp_path / name).exists():
            tiny_models.save(name, tmp_path / name, num_layers=NUM_LAYERS)
        digest = export(tmp_path / name, lora, {}, tmp_path / "export")
        (tmp_path / f"{number}.digest").write_bytes(digest)
    run_ranks(run_rank, tmp_path, num_ranks=2, store=tmp_path / "store", deadline_seconds=100)
