"""Exports and imports of several ranks, against those of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.adapter import Dtype
from common.peft_dir import CONFIG_FILE, WEIGHTS_FILE
from tests import tiny_models
from tests.random_adapters import adapted
from tests.ranks import run_ranks
from trainer_svc.megatron import parallel
from trainer_svc.megatron.adapter_io.export import AdapterExporter
from trainer_svc.megatron.lora.settings import LoraSettings
from trainer_svc.megatron.settings import ParallelSettings

MIXED = {"rank_pattern": {"*.layers.1.*.linear_fc1": 2}, "alpha_pattern": {"linear_proj": 5.0}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", MIXED),
    "canonical": ("llama", {"type": "canonical_lora"}),
    "dora": ("qwen2", {"type": "dora", "dtype": "bfloat16"}),
    "latent": ("deepseek_v3", {}),
    "experts": ("qwen3_moe", {"expert_layout": "flat"}),
    "experts_shared": ("qwen3_moe", {"experts": "shared"}),
    "router_alone": ("qwen3_moe", {"target_modules": ("*.layers.1.*.router",)}),
}
EXPERTS = ("deepseek_v3", "qwen3_moe")
LAYOUTS: dict[str, dict[str, int]] = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "data": {},
    "expert": {"expert_parallel_size": 2},
    "expert_in_tensor": {"tensor_parallel_size": 2, "expert_parallel_size": 2},
    "expert_tensor": {"tensor_parallel_size": 2, "expert_tensor_parallel_size": 2},
}


def names(layout: str) -> list[str]:
    """The cases that can lie so: only experts spread over expert-parallel ranks."""
    only_experts = layout.startswith("expert")
    return [name for name, (model, _) in CASES.items() if not only_experts or model in EXPERTS]


def settings(name: str) -> LoraSettings:
    return LoraSettings.model_validate({"rank": 4, "alpha": 12} | CASES[name][1])


def run_rank(root: Path) -> None:
    """In every layout load what one rank exported, and export it both ways."""
    for layout, sizes in LAYOUTS.items():
        parallel_settings = ParallelSettings.model_validate(sizes)
        parallel.start(parallel_settings)
        for name in names(layout):
            model = adapted(root / CASES[name][0], settings(name), parallel=parallel_settings)
            model.load(root / name / "peft")
            before = {key: value.clone() for key, value in model.values.items()}
            _export(model.exporter(), root / name, layout=layout)
            assert all(torch.equal(before[key], value) for key, value in model.values.items())


def _export(exporter: AdapterExporter, path: Path, *, layout: str) -> None:
    exporter.to_peft_dir(path / f"{layout}.peft")
    exporter.to_file(path / f"{layout}.flat", base_fingerprint="base", dtype=Dtype.BFLOAT16)


@pytest.fixture(scope="module")
def exports(ranks: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case's export by one rank, then by two in every layout."""
    root = tmp_path_factory.mktemp("exports")
    for name, (architecture, _) in CASES.items():
        if not (root / architecture).exists():
            tiny_models.save(architecture, root / architecture)
        model = adapted(root / architecture, settings(name), seed=22)
        (root / name).mkdir()
        model.exporter().to_peft_dir(root / name / "peft")
        model.export(root / name / "flat", dtype=Dtype.BFLOAT16)
    run_ranks(run_rank, root, num_ranks=2, store=root / "store", deadline_seconds=100)
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_export_what_one_did(exports: Path, layout: str) -> None:
    """faults.md 13, Megatron-Bridge#5634; 9: the trainer's tensors are as they were; 3: sent is
    what was held, whoever holds it."""
    for name in names(layout):
        own, expected = exports / name / f"{layout}.peft", exports / name / "peft"
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            assert (own / file).read_bytes() == (expected / file).read_bytes(), (name, file)
        flat = (exports / name / f"{layout}.flat").read_bytes()
        assert flat == (exports / name / "flat").read_bytes(), name
