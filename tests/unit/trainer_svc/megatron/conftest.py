"""One process group and one tiny random model for all tests of the Megatron side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from tests import tiny_models
from trainer_svc.megatron import parallel
from trainer_svc.megatron.protocol import Batch, Sample
from trainer_svc.megatron.settings import ParallelSettings, WorkerSettings


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Megatron's groups over this one process."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel.start(ParallelSettings())
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random Llama of 2 layers, hidden 64, 4 heads in 2 groups, head_dim 32, vocabulary 96."""
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=96,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    path = tmp_path_factory.mktemp("tiny")
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    return path


@pytest.fixture
def settings(tiny_dir: Path) -> WorkerSettings:
    """Float32 training of a rank-4 adapter on every linear."""
    return WorkerSettings.model_validate(
        {
            "model_dir": tiny_dir,
            "dtype": "float32",
            "lora": {"rank": 4, "alpha": 8},
            "train": {"lr": 0.01, "micro_batch_tokens": 24},
        }
    )


@pytest.fixture
def batch() -> Batch:
    """Six samples of different lengths; two carry no advantage."""
    return Batch(
        samples=tuple(
            Sample(
                prompt_ids=tuple(range(1, 3 + i)),
                completion_ids=tuple(range(40 + i, 43 + 2 * i)),
                rollout_logprobs=(-4.5,) * (3 + i),
                advantage=(1.0, -1.0, 0.0)[i % 3],
            )
            for i in range(6)
        )
    )


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a dense model and one with experts, to save and resume."""
    root = tmp_path_factory.mktemp("models")
    tiny_models.save("llama", root / "llama", num_layers=4)
    tiny_models.save("qwen3_moe", root / "qwen3_moe")
    return root
