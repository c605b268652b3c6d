from __future__ import annotations

import torch

from trainer_svc.megatron.model import names
from trainer_svc.megatron.model.names import FC1, FC2, PROJ, QKV, Heads

GQA = Heads(heads=8, groups=2, head_dim=4)


def test_every_row_of_a_fused_qkv_lands_in_its_exact_slot() -> None:
    """faults.md 12, Megatron-Bridge#1818 and miles#2550."""
    fused = torch.arange(48.0).unsqueeze(1).expand(48, 3)
    q, k, v = names.split(QKV, fused, heads=GQA)
    assert q[:, 0].tolist() == [*range(0, 16), *range(24, 40)]
    assert k[:, 0].tolist() == [*range(16, 20), *range(40, 44)]
    assert v[:, 0].tolist() == [*range(20, 24), *range(44, 48)]
    assert torch.equal(names.fuse(QKV, (q, k, v), heads=GQA), fused)


def test_a_bias_splits_like_the_rows() -> None:
    fused = torch.arange(48)
    parts = names.split(QKV, fused, heads=GQA)
    assert [len(part) for part in parts] == [32, 8, 8]
    assert parts[1].tolist() == [16, 17, 18, 19, 40, 41, 42, 43]
    assert torch.equal(names.fuse(QKV, parts, heads=GQA), fused)


def test_gate_and_up_differ_after_a_tensor_parallel_gather() -> None:
    """faults.md 9, unsloth-zoo#941."""
    gate, up = torch.arange(6).unsqueeze(1), torch.arange(100, 106).unsqueeze(1)
    fused = names.fuse(FC1, (gate, up), heads=GQA)
    shards = [names.shard_rows(FC1, fused, rank=rank, size=3) for rank in range(3)]
    assert [shard.flatten().tolist() for shard in shards] == [
        [0, 1, 100, 101],
        [2, 3, 102, 103],
        [4, 5, 104, 105],
    ]
    found_gate, found_up = names.split(FC1, names.join_rows(FC1, shards), heads=GQA)
    assert torch.equal(found_gate, gate)
    assert torch.equal(found_up, up)


def test_a_shard_of_qkv_holds_whole_groups() -> None:
    fused = torch.arange(48).unsqueeze(1)
    shards = [names.shard_rows(QKV, fused, rank=rank, size=2) for rank in range(2)]
    assert shards[1].flatten().tolist() == list(range(24, 48))
    assert torch.equal(names.join_rows(QKV, shards), fused)


def test_hugging_face_names_of_every_kind_of_parameter() -> None:
    layer = "decoder.layers.11."
    table = {
        layer + "self_attention.linear_qkv.weight": (
            "model.layers.11.self_attn.q_proj.weight",
            "model.layers.11.self_attn.k_proj.weight",
            "model.layers.11.self_attn.v_proj.weight",
        ),
        layer + "self_attention.linear_proj.weight": ("model.layers.11.self_attn.o_proj.weight",),
        layer + "mlp.linear_fc1.weight": (
            "model.layers.11.mlp.gate_proj.weight",
            "model.layers.11.mlp.up_proj.weight",
        ),
        layer + "mlp.linear_fc2.weight": ("model.layers.11.mlp.down_proj.weight",),
        layer + "pre_mlp_layernorm.weight": ("model.layers.11.post_attention_layernorm.weight",),
        "output_layer.weight": ("lm_head.weight",),
    }
    assert {name: names.hf_names(name) for name in table} == table


def test_peft_names() -> None:
    assert [names.peft_name(3, p, "lora_B") for p in names.LINEARS[PROJ] + names.LINEARS[FC2]] == [
        "base_model.model.model.layers.3.self_attn.o_proj.lora_B.weight",
        "base_model.model.model.layers.3.mlp.down_proj.lora_B.weight",
    ]
