"""SmolLM2 on Megatron, on vLLM and on Hugging Face with PEFT: one trained adapter, one answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import pytest_asyncio
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout_svc.config import RolloutConfig
from rollout_svc.engine import EngineAdapter, Generation
from rollout_svc.generation.sampling import Sampling
from rollout_svc.vllm_engine.engine import VllmEngine
from trainer_svc.demo import smollm2
from trainer_svc.megatron.checkpoint import ADAPTER_DIR
from trainer_svc.megatron.client import MegatronWorker
from trainer_svc.megatron.protocol import Batch, Sample
from trainer_svc.megatron.settings import TrainSettings, WorkerSettings

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

MODELS = Path(__file__).parents[2] / "models"
DEADLINE_SECONDS = 240.0
NUM_PROMPTS = 24


@dataclass(frozen=True, slots=True)
class Trained:
    """Megatron in fp32 with an adapter after three updates, and that adapter on disk."""

    model: Path
    worker: MegatronWorker
    adapter: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trained(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trained]:
    model = await asyncio.to_thread(smollm2.prepare, MODELS / "smollm2")
    checkpoint = tmp_path_factory.mktemp("parity") / "checkpoint"
    settings = WorkerSettings(model_dir=model, dtype="float32", train=TrainSettings(lr=1e-3))
    async with MegatronWorker(num_ranks=1, max_restarts=0) as worker:
        await worker.wait_connected(deadline_seconds=DEADLINE_SECONDS)
        await worker.init(settings, deadline_seconds=DEADLINE_SECONDS)
        for _ in range(3):
            await worker.step(_random_batch(), deadline_seconds=DEADLINE_SECONDS)
        await worker.save(checkpoint, state={}, deadline_seconds=DEADLINE_SECONDS)
        yield Trained(model, worker, checkpoint / ADAPTER_DIR)


def _random_batch() -> Batch:
    rng = random.Random(0)
    return Batch(
        tuple(
            Sample(
                prompt_ids=tuple(rng.randrange(1000) for _ in range(12)),
                completion_ids=tuple(rng.randrange(1000) for _ in range(6)),
                rollout_logprobs=(-6.0,) * 6,
                advantage=(-1.0) ** i,
            )
            for i in range(8)
        )
    )


@asynccontextmanager
async def _engine(model: Path, *, dtype: str) -> AsyncIterator[VllmEngine]:
    config = RolloutConfig(
        model=model,
        max_lora_rank=16,
        engine={"dtype": dtype, "max_model_len": 256, "max_num_seqs": 16, "enforce_eager": True},
    )
    engine = await VllmEngine.start(config)
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.shutdown)


async def _sampled(trained: Trained, *, dtype: str, temperatures: tuple[float, ...]) -> list[Batch]:
    """Answers of vLLM under the adapter, with vLLM's log-probabilities; a batch a temperature."""
    tokenizer: Any = AutoTokenizer.from_pretrained(trained.model)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Tell me about the number {number}."}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for number in range(NUM_PROMPTS)
    ]
    async with _engine(trained.model, dtype=dtype) as engine:
        adapter = EngineAdapter(1, "default@1", trained.adapter)
        await engine.load(adapter)
        return [
            Batch(
                tuple(
                    await asyncio.gather(
                        *(_sample(engine, adapter, prompt, temperature) for prompt in prompts)
                    )
                )
            )
            for temperature in temperatures
        ]


async def _sample(
    engine: VllmEngine, adapter: EngineAdapter, prompt: list[int], temperature: float
) -> Sample:
    generation = Generation(
        request_id=f"{temperature} {prompt}",
        prompt_token_ids=tuple(prompt),
        sampling=Sampling(n=1, max_tokens=32, temperature=temperature, ignore_eos=True, seed=1),
        adapter=adapter,
        cache_salt="parity",
    )
    async with aclosing(engine.generate(generation)) as deltas:
        found = [delta async for delta in deltas]
    return Sample(
        prompt_ids=tuple(prompt),
        completion_ids=tuple(token for delta in found for token in delta.token_ids),
        rollout_logprobs=tuple(value for delta in found for value in delta.logprobs),
        advantage=0.0,
    )


async def _differences(trained: Trained, batch: Batch) -> list[float]:
    """|vLLM - Megatron| of every sampled token's log-probability."""
    megatron = await trained.worker.logprobs(batch, deadline_seconds=DEADLINE_SECONDS)
    return [
        abs(ours - theirs)
        for sample, values in zip(batch.samples, megatron, strict=True)
        for ours, theirs in zip(values, sample.rollout_logprobs, strict=True)
    ]


async def test_vllm_in_float32_gives_megatrons_log_probabilities(trained: Trained) -> None:
    [sampled] = await _sampled(trained, dtype="float32", temperatures=(1.0,))
    differences = await _differences(trained, sampled)
    print(f"vLLM fp32 against Megatron fp32: max {max(differences):.2e}")
    assert len(differences) == NUM_PROMPTS * 32
    assert max(differences) < 1e-3


async def test_vllm_in_bfloat16_is_as_near_megatron_as_bfloat16_goes(trained: Trained) -> None:
    """Greedy tokens within a mean of 0.02. Sampled ones are less likely, where a logit's rounding
    weighs more: there Hugging Face's own bf16 model is as far from its fp32 one."""
    sampled, greedy = await _sampled(trained, dtype="bfloat16", temperatures=(1.0, 0.0))
    of_greedy = fmean(await _differences(trained, greedy))
    of_sampled = fmean(await _differences(trained, sampled))
    rounding = _mean_rounding(trained, sampled)
    print(
        f"vLLM bf16 against Megatron fp32: mean {of_greedy:.4f} of greedy tokens, "
        f"{of_sampled:.4f} of sampled ones; Hugging Face bf16 against fp32: {rounding:.4f}"
    )
    assert of_greedy < 0.02
    assert of_sampled < 1.1 * rounding


def _mean_rounding(trained: Trained, batch: Batch) -> float:
    """How far Hugging Face's bf16 is from its fp32, the last product in fp32 for both."""
    exact, rounded = (_peft(trained, dtype) for dtype in (torch.float32, torch.bfloat16))
    vocab, hidden = exact.lm_head.weight.shape
    head = torch.nn.Linear(hidden, vocab, bias=False)
    head.weight = exact.lm_head.weight
    rounded.base_model.model.lm_head = head
    head.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
    differences = [_logprobs(exact, s) - _logprobs(rounded, s) for s in batch.samples]
    return float(torch.cat(differences).abs().mean())


def _peft(trained: Trained, dtype: torch.dtype) -> Any:
    base = AutoModelForCausalLM.from_pretrained(trained.model, dtype=dtype)
    return PeftModel.from_pretrained(base, str(trained.adapter)).to(dtype)


async def test_peft_over_hugging_face_gives_megatrons_log_probabilities(trained: Trained) -> None:
    batch = _random_batch()
    megatron = await trained.worker.logprobs(batch, deadline_seconds=DEADLINE_SECONDS)
    base = AutoModelForCausalLM.from_pretrained(trained.model, dtype=torch.float32)
    without = [_logprobs(base, sample) for sample in batch.samples]
    adapted = PeftModel.from_pretrained(base, str(trained.adapter))
    with_adapter = [_logprobs(adapted, sample) for sample in batch.samples]

    torch.testing.assert_close(torch.tensor(megatron), torch.stack(with_adapter), atol=1e-4, rtol=0)
    # Three updates moved the policy by far more than the tolerance.
    assert (torch.stack(with_adapter) - torch.stack(without)).abs().mean() > 0.1


@torch.no_grad()
def _logprobs(model: Any, sample: Sample) -> torch.Tensor:
    tokens = torch.tensor([sample.prompt_ids + sample.completion_ids])
    logits: torch.Tensor = model(tokens).logits[0, len(sample.prompt_ids) - 1 : -1]
    rows = logits.log_softmax(-1)
    targets = torch.tensor(sample.completion_ids)
    return rows.gather(-1, targets[:, None])[:, 0]


async def test_base_logits_agree_with_hugging_face(trained: Trained) -> None:
    """A fresh adapter changes nothing, so this is the base model on both sides."""
    settings = WorkerSettings(model_dir=trained.model, dtype="float32")
    await trained.worker.init(settings, deadline_seconds=DEADLINE_SECONDS)
    sample = replace(_random_batch().samples[0], advantage=0.0)
    megatron = await trained.worker.logprobs(Batch((sample,)), deadline_seconds=DEADLINE_SECONDS)
    base = AutoModelForCausalLM.from_pretrained(trained.model, dtype=torch.float32)

    torch.testing.assert_close(
        torch.tensor(megatron[0]), _logprobs(base, sample), atol=1e-4, rtol=0
    )
