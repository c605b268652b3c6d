"""A real vLLM engine, one for this directory, on the tiny Llama in fp32."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM

from common.model_dir import base_model
from rollout_svc.config import RolloutConfig
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.vllm_engine.engine import VllmEngine
from tests.integration.rollout_engine.openai_client import Endpoint, serving
from tests.integration.rollout_engine.tiny import RANK, AdapterMaker, registry_of, write_model


@pytest.fixture(scope="package")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="package")
def config(model_dir: Path) -> RolloutConfig:
    return RolloutConfig(
        model=model_dir,
        max_loras=3,
        max_lora_rank=RANK,
        engine={
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "block_size": 32,
            "enforce_eager": True,
        },
    )


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def engine(config: RolloutConfig) -> AsyncIterator[VllmEngine]:
    engine = await VllmEngine.start(config)
    yield engine
    engine.shutdown()


@pytest_asyncio.fixture(loop_scope="package")
async def registry(engine: VllmEngine, model_dir: Path) -> AsyncIterator[AdapterRegistry]:
    """An empty registry, whose adapters are gone from the engine afterwards."""
    async with registry_of(engine, base_model(model_dir), model=model_dir) as registry:
        yield registry


@pytest.fixture
def adapters(tmp_path: Path, model_dir: Path) -> AdapterMaker:
    return AdapterMaker(tmp_path / "adapters", base_model(model_dir).fingerprint)


@pytest.fixture(scope="package")
def reference(model_dir: Path) -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.eval()
    return model


@pytest_asyncio.fixture(loop_scope="package")
async def endpoint(
    config: RolloutConfig, engine: VllmEngine, registry: AdapterRegistry
) -> AsyncIterator[Endpoint]:
    async with serving(config, engine, registry) as endpoint:
        yield endpoint
