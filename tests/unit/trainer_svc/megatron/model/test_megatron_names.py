from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests import tiny_models
from trainer_svc.megatron.model import names
from trainer_svc.megatron.model.architectures import read_base_config
from trainer_svc.megatron.model.base_config import Heads
from trainer_svc.megatron.model.build import build_model
from trainer_svc.megatron.model.linears import Fusion, Split
from trainer_svc.megatron.model.names import Stored
from trainer_svc.megatron.model.weights import named_tensors

GQA = Heads(heads=8, groups=2, head_dim=4)


def test_every_row_of_a_fused_qkv_lands_in_its_exact_slot() -> None:
    """faults.md 12, Megatron-Bridge#1818 and miles#2550."""
    fused = torch.arange(48.0).unsqueeze(1).expand(48, 3)
    q, k, v = names.split(Fusion.QKV, fused, heads=GQA)
    assert q[:, 0].tolist() == [*range(0, 16), *range(24, 40)]
    assert k[:, 0].tolist() == [*range(16, 20), *range(40, 44)]
    assert v[:, 0].tolist() == [*range(20, 24), *range(44, 48)]
    assert torch.equal(names.fuse(Fusion.QKV, (q, k, v), heads=GQA), fused)


def test_a_bias_splits_like_the_rows() -> None:
    fused = torch.arange(48)
    parts = names.split(Fusion.QKV, fused, heads=GQA)
    assert [len(part) for part in parts] == [32, 8, 8]
    assert parts[1].tolist() == [16, 17, 18, 19, 40, 41, 42, 43]
    assert torch.equal(names.fuse(Fusion.QKV, parts, heads=GQA), fused)


def test_gate_and_up_differ_after_a_tensor_parallel_gather() -> None:
    """faults.md 9, unsloth-zoo#941."""
    gate, up = torch.arange(6).unsqueeze(1), torch.arange(100, 106).unsqueeze(1)
    fused = names.fuse(Fusion.GATE_UP, (gate, up), heads=GQA)
    lies = Stored(("gate", "up"), Split.ROWS, Fusion.GATE_UP).shard
    shards = [lies.part(fused, rank=rank, size=3) for rank in range(3)]
    assert [shard.flatten().tolist() for shard in shards] == [
        [0, 1, 100, 101],
        [2, 3, 102, 103],
        [4, 5, 104, 105],
    ]
    found_gate, found_up = names.split(Fusion.GATE_UP, lies.join(shards), heads=GQA)
    assert torch.equal(found_gate, gate)
    assert torch.equal(found_up, up)


def test_a_shard_of_qkv_holds_whole_groups() -> None:
    fused = torch.arange(48).unsqueeze(1)
    lies = Stored(("q", "k", "v"), Split.ROWS, Fusion.QKV).shard
    shards = [lies.part(fused, rank=rank, size=2) for rank in range(2)]
    assert shards[1].flatten().tolist() == list(range(24, 48))
    assert torch.equal(lies.join(shards), fused)


def test_a_row_parallel_linear_is_split_by_columns() -> None:
    whole = torch.arange(8).view(2, 4)
    part = Stored(("o_proj",), Split.COLUMNS).shard.part(whole, rank=1, size=2)
    assert part.tolist() == [[2, 3], [6, 7]]


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("name", tiny_models.ARCHITECTURES)
def test_parameters_take_every_tensor_of_a_directory_once(name: str, tmp_path: Path) -> None:
    path = tiny_models.save(name, tmp_path)
    model = build_model(path, dtype=torch.float32)
    taken = [
        part
        for tensor_name, _ in named_tensors(model.chunks[0], model.config)
        for part in names.stored(model.config, tensor_name).names
    ]
    with safe_open(path / "model.safetensors", "pt") as file:
        assert sorted(taken) == sorted(file.keys())


def test_names_of_a_later_rank_count_over_the_whole_model(tmp_path: Path) -> None:
    base = read_base_config(tiny_models.save_config("mixtral", tmp_path, num_layers=4))
    own = "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight"
    name = names.global_name(own, first_layer=2, first_expert=2)
    assert names.stored(base, name) == Stored(
        (
            "model.layers.3.block_sparse_moe.experts.2.w1.weight",
            "model.layers.3.block_sparse_moe.experts.2.w3.weight",
        ),
        split=Split.ROWS,
        fusion=Fusion.GATE_UP,
        is_expert=True,
    )


def test_a_tied_output_layer_of_a_last_stage_is_the_embedding(tmp_path: Path) -> None:
    for name, expected in (("llama", "lm_head.weight"), ("qwen2", "model.embed_tokens.weight")):
        base = read_base_config(tiny_models.save_config(name, tmp_path))
        assert names.stored(base, "output_layer.weight") == Stored((expected,), Split.ROWS)
