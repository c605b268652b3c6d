"""The base model over two ranks, in every way to split it, against Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from common.errors import ConfigError
from tests import tiny_models
from tests.ranks import run_ranks
from trainer_svc.megatron import parallel
from trainer_svc.megatron.model.architectures import read_base_config
from trainer_svc.megatron.model.build import BaseModel, build_model
from trainer_svc.megatron.model.forward import hidden_states, output_logits
from trainer_svc.megatron.model.layout import causal_layout
from trainer_svc.megatron.model.megatron_config import megatron_config
from trainer_svc.megatron.settings import ParallelSettings

NUM_LAYERS = 4
LENGTHS = [40, 24]
TOKENS = torch.randint(0, tiny_models.VOCAB_SIZE, (64,), generator=torch.Generator().manual_seed(2))
LAYOUT = causal_layout(LENGTHS)

TENSOR = {"tensor_parallel_size": 2}
PIPELINE = {"pipeline_parallel_size": 2}
VIRTUAL = PIPELINE | {"virtual_pipeline_size": 2}
EXPERT = {"expert_parallel_size": 2}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", TENSOR),
    ("llama", TENSOR | {"sequence_parallel": True}),
    ("llama_tied", TENSOR),
    ("llama_tied", PIPELINE),
    ("qwen2", TENSOR),
    ("qwen2", VIRTUAL),
    ("qwen3", TENSOR | {"sequence_parallel": True}),
    ("qwen3_moe", EXPERT),
    ("qwen3_moe", TENSOR),
    ("qwen3_moe", TENSOR | EXPERT),
    ("qwen3_moe", TENSOR | {"expert_tensor_parallel_size": 2}),
    ("qwen3_moe_unnormed", VIRTUAL),
    ("mixtral", EXPERT),
    ("deepseek_v2_grouped", TENSOR),
    ("deepseek_v3", EXPERT),
    ("deepseek_v3", TENSOR | EXPERT),
    ("deepseek_v3", VIRTUAL),
]


def run_rank(root: Path) -> None:
    """Check every case's logits against those beside its model in `root`."""
    for name, sizes in CASES:
        settings = ParallelSettings(**sizes)
        parallel.start(settings)
        path = root / name
        model = build_model(path, dtype=torch.float32, parallel=settings)
        logits = pipelined_logits(model)
        if logits is not None:
            expected = torch.load(path / "logits.pt")
            difference = float((logits - expected).abs().max())
            assert difference < 1e-5, f"{name}, {sizes}: {difference}"


@torch.no_grad()
def pipelined_logits(model: BaseModel) -> Tensor | None:
    """Logits (T, vocab) on the last stage, hidden states sent from each stage to the next."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    this = parallel_state.get_pipeline_model_parallel_rank()
    for chunk in model.chunks:
        # Tensor and pipeline ranks never both exist here, so stage and rank are the same.
        if not chunk.pre_process:
            received = torch.empty(len(TOKENS), 1, model.config.hidden_size)
            dist.recv(received, (this - 1) % stages)
            chunk.set_input_tensor(received)
        hidden = hidden_states(chunk, TOKENS, layout=LAYOUT)
        if chunk.post_process:
            return output_logits(chunk, hidden).squeeze(1)
        dist.send(hidden, (this + 1) % stages)
    return None


@pytest.mark.timeout(240)
@torch.no_grad()
def test_logits_over_two_ranks_are_those_of_hugging_face(tmp_path: Path) -> None:
    for name in {name for name, _ in CASES}:
        path = tiny_models.save(name, tmp_path / name, num_layers=NUM_LAYERS)
        model = tiny_models.load(path)
        logits = [model(part[None]).logits[0] for part in torch.split(TOKENS, LENGTHS)]
        torch.save(torch.cat(logits), path / "logits.pt")
    run_ranks(run_rank, tmp_path, num_ranks=2, store=tmp_path / "store", deadline_seconds=200)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("llama", {"tensor_parallel_size": 3}, "num_attention_heads of 4"),
        ("llama", {"tensor_parallel_size": 4}, "num_key_value_heads of 2"),
        ("llama", {"pipeline_parallel_size": 3}, "num_hidden_layers of 4"),
        ("llama", VIRTUAL | {"virtual_pipeline_size": 3}, "found 6, .* num_hidden_layers of 4"),
        ("llama", EXPERT, "expert_parallel_size: found 2, but the model has no experts"),
        ("mixtral", {"expert_parallel_size": 3}, "number of experts of 4"),
        ("qwen3_moe", {"expert_tensor_parallel_size": 16}, "moe_intermediate_size of 24"),
        ("mixtral", TENSOR | {"sequence_parallel": False}, "sequence_parallel: found false"),
    ],
)
def test_sizes_that_do_not_split_are_named(
    name: str, sizes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    base = read_base_config(tiny_models.save_config(name, tmp_path, num_layers=NUM_LAYERS))
    with pytest.raises(ConfigError, match=message) as caught:
        megatron_config(base, dtype=torch.float32, parallel=ParallelSettings(**sizes))
    assert "\n" not in str(caught.value)
