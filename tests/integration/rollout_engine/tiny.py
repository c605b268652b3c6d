"""A tiny random Llama, adapters for it, and what they should answer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from common.adapter import (
    AdapterRef,
    Dtype,
    Layout,
    LoraConfig,
    Manifest,
    TensorEntry,
    plan,
    seal,
)
from common.model_dir import BaseModel
from common.peft_dir import write_peft_dir
from common.stream.content import Content
from common.tasks import cancel
from rollout_svc.engine import Generation, TokenDelta
from rollout_svc.generation.sampling import Sampling
from rollout_svc.versions.live import LiveAdapter
from rollout_svc.versions.pristine import PristineBase
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.vllm_engine.engine import VllmEngine

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 128, 256, 4, 2, 32, 2, 512
WIDTHS = {
    "self_attn.q_proj": (HIDDEN, HEADS * HEAD_DIM),
    "self_attn.k_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "self_attn.v_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "self_attn.o_proj": (HEADS * HEAD_DIM, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INTERMEDIATE),
    "mlp.up_proj": (HIDDEN, INTERMEDIATE),
    "mlp.down_proj": (INTERMEDIATE, HIDDEN),
}
TORCH_DTYPES = {
    Dtype.FLOAT32: torch.float32,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT16: torch.float16,
}
RANK: Final = 8
PROMPT = tuple(range(5, 25))
GREEDY = Sampling(n=1, max_tokens=24, temperature=0.0, ignore_eos=True)
request_ids = (f"request-{number}" for number in itertools.count())


def write_model(path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    byte_level_tokenizer().save_pretrained(path)
    return path


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and a chat template that writes each turn as role:content;"""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*alphabet, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = (
        "{% for turn in messages %}{{ turn.role }}:{{ turn.content }};{% endfor %}assistant:"
    )
    return fast


class AdapterMaker:
    """Writes PEFT directories with random factors for the tiny model."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path, self._fingerprint = path, fingerprint
        self._numbers = itertools.count(1)

    def make(
        self,
        *,
        seed: int,
        alpha: float = 16.0,
        b_factor: float = 1.0,
        dtype: Dtype = Dtype.FLOAT32,
        layers: tuple[int, ...] = (0, 1),
        narrower: int = 1,
        rank: int = RANK,
        adapter: str = "default",
        more: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> tuple[Content, Path]:
        """A random version; `more` are tensors of zeros, in the place of its own of that name."""
        generator = torch.Generator().manual_seed(seed)
        tensors: dict[str, torch.Tensor] = {}
        for layer, (name, (width_in, width_out)) in itertools.product(layers, WIDTHS.items()):
            shapes = ((rank, width_in // narrower), (width_out, rank))
            for layout, shape in zip((Layout.LORA_A, Layout.LORA_B), shapes, strict=True):
                # Multiples of 1/64 within (-1/4, 1/4): exact in every dtype.
                values = torch.randint(-15, 16, shape, generator=generator) / 64
                factor = b_factor if layout is Layout.LORA_B else 1.0
                key = f"base_model.model.model.layers.{layer}.{name}.{layout.value}.weight"
                tensors[key] = (values * factor).to(TORCH_DTYPES[dtype])
        for key, size in more.items():
            tensors[key] = torch.zeros(size, dtype=TORCH_DTYPES[dtype])
        lora = LoraConfig(rank, alpha, tuple(sorted(name.split(".")[1] for name in WIDTHS)))
        return self._write(tensors, lora, dtype, adapter)

    def _write(
        self, tensors: dict[str, torch.Tensor], lora: LoraConfig, dtype: Dtype, adapter: str
    ) -> tuple[Content, Path]:
        specs = plan(
            TensorEntry(
                name,
                dtype,
                tuple(tensor.shape),
                Layout.LORA_A if ".lora_A." in name else Layout.LORA_B,
            )
            for name, tensor in tensors.items()
        )
        buffer = memoryview(
            b"".join(tensors[spec.name].view(torch.uint8).numpy().tobytes() for spec in specs)
        )
        manifest = Manifest(self._fingerprint, lora, seal(specs, buffer))
        number = next(self._numbers)
        path = write_peft_dir(self._path / str(number), manifest, buffer)
        ref = AdapterRef("run", adapter, number, manifest.digest())
        return Content.whole(ref, manifest, buffer), path


async def sample(
    engine: VllmEngine,
    live: LiveAdapter | None,
    *,
    sampling: Sampling = GREEDY,
    prompt: tuple[int, ...] = PROMPT,
    cache_salt: str = "",
) -> list[TokenDelta]:
    generation = Generation(
        request_id=next(request_ids),
        prompt_token_ids=prompt,
        sampling=sampling,
        adapter=live.lora if live else None,
        cache_salt=cache_salt or (live.ref.digest.hex() if live else "base"),
    )
    async with aclosing(engine.generate(generation)) as deltas:
        return [delta async for delta in deltas]


def tokens(deltas: list[TokenDelta]) -> tuple[int, ...]:
    return tuple(token for delta in deltas for token in delta.token_ids)


def logprobs(deltas: list[TokenDelta]) -> tuple[float, ...]:
    return tuple(value for delta in deltas for value in delta.logprobs)


def expected_logprobs(
    reference: LlamaForCausalLM,
    path: Path | None,
    prompt: tuple[int, ...],
    answer: tuple[int, ...],
    *,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Log-softmax of logits / temperature at the answer's tokens, by Hugging Face and PEFT."""
    model: Any = PeftModel.from_pretrained(reference, path) if path else reference
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt + answer])).logits[0]
    if path:
        model.unload()
    rows = logits[len(prompt) - 1 : -1].div(temperature).log_softmax(-1)
    return rows.gather(-1, torch.tensor(answer)[:, None])[:, 0]


@asynccontextmanager
async def registry_of(
    engine: VllmEngine, base: BaseModel, *, model: Path | None
) -> AsyncIterator[AdapterRegistry]:
    """An empty registry, whose adapters are gone from the engine afterwards.

    Args:
        model: directory of the base's weights; None where the engine started without.
    """
    registry = AdapterRegistry(
        engine=engine,
        base=base,
        pristine=PristineBase(model),
        slots=3,
        keep_versions=2,
        slot_wait_seconds=20.0,
    )
    unloading = asyncio.create_task(registry.run())
    yield registry
    await cancel(unloading)
    for live in registry.versions.all:
        await engine.unload(live.loaded.id)
