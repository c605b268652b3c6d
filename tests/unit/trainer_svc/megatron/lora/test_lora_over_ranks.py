"""Adapters over two ranks, in every way to split a layer, against one rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests import tiny_models
from tests.ranks import run_ranks
from trainer_svc.megatron import parallel
from trainer_svc.megatron.lora.layers import (
    TrainedTensor,
    add_lora,
    trained_tensors,
)
from trainer_svc.megatron.lora.plan import plan_adapter
from trainer_svc.megatron.lora.settings import LoraSettings
from trainer_svc.megatron.model.build import BaseModel, build_model
from trainer_svc.megatron.model.forward import hidden_states, output_logits
from trainer_svc.megatron.model.layout import causal_layout
from trainer_svc.megatron.settings import ParallelSettings

TENSOR = {"tensor_parallel_size": 2}
SEQUENCE = TENSOR | {"sequence_parallel": True}
EXPERT = {"expert_parallel_size": 2}
SPLIT_EXPERTS = TENSOR | {"expert_tensor_parallel_size": 2}
ALL = {"target_modules": ["linear_*", "router"]}

VIRTUAL = {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}
PIPELINED = ("llama", {"rank": 4}, VIRTUAL)

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (name, lora | {"rank": 4, "b_init": "normal"}, sizes)
    for name, loras, layouts in (
        (
            "qwen2",
            ({}, {"type": "canonical_lora"}, {"type": "dora"}),
            (TENSOR, SEQUENCE),
        ),
        ("deepseek_v2_grouped", (ALL | {"type": "dora"},), (TENSOR,)),
        (
            "qwen3_moe",
            (ALL | {"type": "dora"}, {"type": "canonical_lora"}, {"experts": "shared"}),
            (EXPERT, TENSOR | EXPERT, SPLIT_EXPERTS),
        ),
    )
    for lora in loras
    for sizes in layouts
]
ROWS = (torch.arange(2 * 32) * 37 % tiny_models.VOCAB_SIZE).view(2, 32)


@dataclass(frozen=True)
class Job:
    """Where the models lie, and what one rank makes of each adapter."""

    directory: Path


def build(directory: Path, name: str, lora: dict[str, Any], sizes: dict[str, Any]) -> BaseModel:
    settings = ParallelSettings.model_validate(sizes)
    base = build_model(directory / name, dtype=torch.float32, parallel=settings)
    plan = plan_adapter(base.config, LoraSettings.model_validate(lora))
    add_lora(base, plan=plan, seed=5)
    for tensor in trained_tensors(base.chunks):
        if tensor.name.endswith("magnitude"):
            tensor.parameter.data.mul_(1.1)
    return base


def gradients(base: BaseModel, row: Tensor) -> dict[str, Tensor]:
    (chunk,) = base.chunks
    hidden = hidden_states(chunk, row, layout=causal_layout([len(row)]))
    logits = output_logits(chunk, hidden).flatten(0, 1)
    torch.autograd.backward(cross_entropy(logits[:-1], row[1:]))
    return {
        tensor.name: torch.zeros_like(tensor.parameter)
        if tensor.parameter.grad is None
        else tensor.parameter.grad
        for tensor in trained_tensors(base.chunks)
    }


def sum_over_ranks(tensor: TrainedTensor, gradient: Tensor) -> Tensor:
    """As the flags of a trained tensor say it."""
    if tensor.partial_over_tp:
        parallel.sum_over(tensor.group, [gradient])
    if tensor.is_shared_by_experts:
        parallel.sum_over(parallel.expert_group(), [gradient])
    expert = tensor.is_expert or tensor.is_shared_by_experts
    parallel.sum_over(parallel.expert_dp_group() if expert else parallel.dp_group(), [gradient])
    return gradient


def file(directory: Path, name: str, lora: dict[str, Any]) -> Path:
    own = "_".join(
        [name, lora.get("type", "lora"), lora.get("experts", ""), str("router" in str(lora))]
    )
    return directory / f"{own}.pt"


def run_rank(job: Job) -> None:
    for name, lora, sizes in CASES:
        parallel.start(ParallelSettings.model_validate(sizes))
        base = build(job.directory, name, lora, sizes)
        one = torch.load(file(job.directory, name, lora))
        found = gradients(base, ROWS[parallel.dp_rank()])
        for tensor in trained_tensors(base.chunks):
            case = f"{tensor.name} of {name}, {lora}, {sizes}"
            check_start(tensor, one["values"][tensor.name], case=case)
            of_rows = [of_row[tensor.name] for of_row in one["gradients"]]
            wanted = own_part(tensor, torch.stack(of_rows[: parallel.dp_size()]).sum(0))
            gradient = sum_over_ranks(tensor, found[tensor.name])
            error = float((gradient - wanted).norm() / wanted.norm().clamp_min(1e-9))
            assert error < 1e-4, f"{case}: the gradient is off by {error}"
    check_pipelined(job.directory)


def check_start(tensor: TrainedTensor, value: Tensor, *, case: str) -> None:
    """The same bits; a magnitude is a norm whose terms ranks add up."""
    assert tensor.whole_shape == value.shape
    tolerance = 1e-6 if tensor.name.endswith("magnitude") else 0
    part = own_part(tensor, value)
    torch.testing.assert_close(
        tensor.parameter.detach(), part, rtol=tolerance, atol=0, msg=f"{case}: the start value"
    )


def own_part(tensor: TrainedTensor, whole: Tensor) -> Tensor:
    return tensor.shard.part(whole, rank=tensor.group.rank(), size=tensor.group.size())


def check_pipelined(directory: Path) -> None:
    """Each rank has its stages' tensors, in the plan's order, with the values of one rank's."""
    name, lora, sizes = PIPELINED
    parallel.start(ParallelSettings.model_validate(sizes))
    tensors = trained_tensors(build(directory, name, lora, sizes).chunks)
    one = torch.load(file(directory, name, lora))["values"]
    stages = (0, 2) if dist.get_rank() == 0 else (1, 3)
    assert [tensor.name for tensor in tensors] == [
        name for name in one if int(name.split(".")[2]) in stages
    ]
    for tensor in tensors:
        check_start(tensor, one[tensor.name], case=f"{tensor.name} in a pipeline")


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ranks")
def test_start_values_and_gradients_over_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    """faults.md 13, Megatron-Bridge#5634: experts under expert tensor parallelism among them."""
    for name in {name for name, _, _ in CASES}:
        tiny_models.save(name, tmp_path / name)
    tiny_models.save(PIPELINED[0], tmp_path / PIPELINED[0], num_layers=4)
    for name, lora, _ in (*CASES, PIPELINED):
        if file(tmp_path, name, lora).exists():
            continue
        bases = [build(tmp_path, name, lora, {}) for _ in ROWS]
        values = {t.name: t.parameter.detach() for t in trained_tensors(bases[0].chunks)}
        rows = [gradients(base, row) for base, row in zip(bases, ROWS, strict=True)]
        torch.save({"values": values, "gradients": rows}, file(tmp_path, name, lora))
    run_ranks(run_rank, Job(tmp_path), num_ranks=2, store=tmp_path / "store", deadline_seconds=240)
