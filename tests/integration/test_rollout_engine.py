"""A real vLLM engine, one for the whole module, on a tiny random Llama in fp32."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
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
from common.errors import ConfigError, Incompatible
from common.model_dir import base_model
from common.peft_dir import write_peft_dir
from rollout_svc.adapters import AdapterRegistry, LiveAdapter
from rollout_svc.config import RolloutConfig
from rollout_svc.engine import FinishReason, Generation, Message, TokenDelta
from rollout_svc.sampling import Sampling
from rollout_svc.selector import Rule, Selector
from rollout_svc.vllm_engine import VllmEngine

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

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
RANK = 8
PROMPT = tuple(range(5, 25))
GREEDY = Sampling(n=1, max_tokens=24, temperature=0.0, ignore_eos=True)
request_ids = (f"request-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    path = tmp_path_factory.mktemp("model") / "tiny"
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


@pytest.fixture(scope="module")
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(config: RolloutConfig) -> AsyncIterator[VllmEngine]:
    engine = await VllmEngine.start(config)
    yield engine
    engine.shutdown()


@pytest_asyncio.fixture(loop_scope="module")
async def registry(engine: VllmEngine) -> AsyncIterator[AdapterRegistry]:
    """An empty registry, whose adapters are gone from the engine afterwards."""
    registry = AdapterRegistry(engine=engine, slots=3, keep_versions=2, slot_wait_seconds=20.0)
    unloading = asyncio.create_task(registry.run())
    yield registry
    unloading.cancel()
    for live in registry._live:
        await engine.unload(live.loaded.id)


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
    ) -> tuple[AdapterRef, Path]:
        generator = torch.Generator().manual_seed(seed)
        tensors: dict[str, torch.Tensor] = {}
        for layer, (name, (width_in, width_out)) in itertools.product(layers, WIDTHS.items()):
            shapes = ((RANK, width_in // narrower), (width_out, RANK))
            for layout, shape in zip(Layout, shapes, strict=True):
                # Multiples of 1/64 within (-1/4, 1/4): exact in every dtype.
                values = torch.randint(-15, 16, shape, generator=generator) / 64
                factor = b_factor if layout is Layout.LORA_B else 1.0
                key = f"base_model.model.model.layers.{layer}.{name}.{layout.value}.weight"
                tensors[key] = (values * factor).to(TORCH_DTYPES[dtype])
        return self._write(tensors, alpha, dtype)

    def _write(
        self, tensors: dict[str, torch.Tensor], alpha: float, dtype: Dtype
    ) -> tuple[AdapterRef, Path]:
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
        lora = LoraConfig(RANK, alpha, tuple(sorted(name.split(".")[1] for name in WIDTHS)))
        manifest = Manifest(self._fingerprint, lora, seal(specs, buffer))
        number = next(self._numbers)
        path = write_peft_dir(self._path / str(number), manifest, buffer)
        return AdapterRef("run", "default", number, manifest.digest()), path


@pytest.fixture
def adapters(tmp_path: Path, model_dir: Path) -> AdapterMaker:
    return AdapterMaker(tmp_path / "adapters", base_model(model_dir).fingerprint)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Iterator[LlamaForCausalLM]:
    yield LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


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
        adapter=live.loaded if live else None,
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


async def test_capabilities_name_projections_as_peft_does(engine: VllmEngine) -> None:
    capabilities = engine.capabilities
    assert capabilities.target_modules == (
        "down_proj",
        "gate_proj",
        "k_proj",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    )
    assert (capabilities.max_rank, capabilities.max_loras) == (RANK, 3)
    assert (capabilities.max_model_len, capabilities.vocab_size) == (1024, VOCAB)


async def test_a_committed_adapter_answers_and_the_base_stays_itself(
    engine: VllmEngine,
    registry: AdapterRegistry,
    adapters: AdapterMaker,
    reference: LlamaForCausalLM,
) -> None:
    """Fault 1: the served log-probabilities are the adapter's and differ from the base's."""
    ref, path = adapters.make(seed=1)
    before = await sample(engine, None)
    reports = await registry.commit(ref, path)
    assert [report.bound_modules for report in reports] == [LAYERS * len(WIDTHS)]
    async with registry.admit(Selector(Rule.LATEST, "default"), wait_seconds=1) as live:
        served = await sample(engine, live)
    expected = expected_logprobs(reference, path, PROMPT, tokens(served))
    torch.testing.assert_close(torch.tensor(logprobs(served)), expected, atol=1e-3, rtol=0)
    base = expected_logprobs(reference, None, PROMPT, tokens(served))
    assert (expected - base).abs().max() > 0.1
    after = await sample(engine, None)
    assert (tokens(after), logprobs(after)) == (tokens(before), logprobs(before))


async def test_new_versions_leave_a_running_generation_alone(
    engine: VllmEngine, registry: AdapterRegistry, adapters: AdapterMaker
) -> None:
    """Fault 20: a long generation on v1, while v2 and v3 arrive, ends as if they had not."""
    versions = [adapters.make(seed=seed) for seed in (1, 2, 3)]
    await registry.commit(*versions[0])
    long = replace(GREEDY, max_tokens=400)
    async with registry.admit(Selector(Rule.LATEST, "default"), wait_seconds=1) as live:
        undisturbed = await sample(engine, live, sampling=long)
        running = asyncio.create_task(sample(engine, live, sampling=long))
        await registry.commit(*versions[1])
        await registry.commit(*versions[2])
        assert not running.done()
        disturbed = await running
    assert tokens(disturbed) == tokens(undisturbed)
    assert logprobs(disturbed) == logprobs(undisturbed)
    assert registry.listing() == [versions[1][0], versions[2][0]]


async def test_a_mixed_batch_answers_each_request_with_its_own_weights(
    engine: VllmEngine,
    registry: AdapterRegistry,
    adapters: AdapterMaker,
    reference: LlamaForCausalLM,
) -> None:
    """Base, v1 and v3 in one batch while every slot is taken: vLLM's own CPU arithmetic answers
    the base request with the last slot's adapter, and a vLLM that changed would do so again."""
    versions = [adapters.make(seed=seed) for seed in (1, 2, 3)]
    latest = Selector(Rule.LATEST, "default")
    await registry.commit(*versions[0])
    async with registry.admit(latest, wait_seconds=1) as first:
        await registry.commit(*versions[1])
        await registry.commit(*versions[2])
        async with registry.admit(latest, wait_seconds=1) as third:
            answers = await asyncio.gather(
                *(sample(engine, live, cache_salt="mixed") for live in (None, first, third))
            )
    for answer, path in zip(answers, (None, versions[0][1], versions[2][1]), strict=True):
        expected = expected_logprobs(reference, path, PROMPT, tokens(answer))
        torch.testing.assert_close(torch.tensor(logprobs(answer)), expected, atol=1e-3, rtol=0)


async def test_a_prompt_of_several_blocks_is_not_read_from_another_versions_cache(
    engine: VllmEngine,
    registry: AdapterRegistry,
    adapters: AdapterMaker,
    reference: LlamaForCausalLM,
) -> None:
    """Fault 19: after v1 has cached the prompt, v2 gives exactly what a cold v2 gives."""
    prompt = tuple((7 * position) % VOCAB for position in range(200))
    first, second = adapters.make(seed=1), adapters.make(seed=2)
    await registry.commit(*first)
    await registry.commit(*second)
    latest, exact = Selector(Rule.LATEST, "default"), Selector(Rule.EXACT, "default", 1)
    async with registry.admit(exact, wait_seconds=1) as live:
        await sample(engine, live, prompt=prompt)
    async with registry.admit(latest, wait_seconds=1) as live:
        after_first = await sample(engine, live, prompt=prompt)
        cold = await sample(engine, live, prompt=prompt, cache_salt="never used before")
    assert (tokens(after_first), logprobs(after_first)) == (tokens(cold), logprobs(cold))
    expected = expected_logprobs(reference, second[1], prompt, tokens(cold))
    torch.testing.assert_close(torch.tensor(logprobs(cold)), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"layers": (7,)}, "the model has no such module"),
        ({"layers": (1, 2)}, "14 tensors found no module: .*layers.2"),
        ({"narrower": 2}, "64 in_features, the module has 128"),
    ],
)
async def test_an_adapter_that_binds_to_nothing_is_refused_by_name(
    engine: VllmEngine,
    registry: AdapterRegistry,
    adapters: AdapterMaker,
    wrong: dict[str, object],
    reason: str,
) -> None:
    """Faults 8 and 26: refused, naming the tensors; no listing changes and no slot leaks."""
    ref, path = adapters.make(seed=1)
    await registry.commit(ref, path)
    bad, bad_path = adapters.make(seed=2, **wrong)  # type: ignore[arg-type]
    with pytest.raises(Incompatible, match=reason):
        await registry.commit(bad, bad_path)
    assert registry.listing() == [ref]
    assert not bad_path.exists()
    assert list(await engine._llm.list_loras()) == [live.loaded.id for live in registry._live]


async def test_served_logprobs_are_of_the_distribution_sampled_from(
    engine: VllmEngine,
    registry: AdapterRegistry,
    adapters: AdapterMaker,
    reference: LlamaForCausalLM,
) -> None:
    """Fault 18: at temperature 0.7 they are the log-softmax of logits / 0.7."""
    ref, path = adapters.make(seed=4)
    await registry.commit(ref, path)
    sampling = Sampling(n=1, max_tokens=64, temperature=0.7, seed=11, ignore_eos=True)
    async with registry.admit(Selector(Rule.LATEST, "default"), wait_seconds=1) as live:
        served = await sample(engine, live, sampling=sampling)
    expected = expected_logprobs(reference, path, PROMPT, tokens(served), temperature=0.7)
    torch.testing.assert_close(torch.tensor(logprobs(served)), expected, atol=1e-3, rtol=0)


async def test_the_served_change_is_linear_in_alpha(
    engine: VllmEngine, registry: AdapterRegistry, adapters: AdapterMaker
) -> None:
    """Fault 14: twice alpha is what twice B is, exactly, and not what alpha is."""
    answers = []
    for alpha, b_factor in ((32.0, 1.0), (16.0, 2.0), (16.0, 1.0)):
        ref, path = adapters.make(seed=5, alpha=alpha, b_factor=b_factor)
        await registry.commit(ref, path)
        exact = Selector(Rule.EXACT, "default", ref.version)
        async with registry.admit(exact, wait_seconds=1) as live:
            answers.append(logprobs(await sample(engine, live)))
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


async def test_every_dtype_on_the_wire_gives_the_same_answer(
    engine: VllmEngine, registry: AdapterRegistry, adapters: AdapterMaker
) -> None:
    """Fault 17: values that all dtypes hold exactly are served alike from each."""
    answers = []
    for dtype in Dtype:
        ref, path = adapters.make(seed=6, dtype=dtype)
        await registry.commit(ref, path)
        async with registry.admit(Selector(Rule.LATEST, "default"), wait_seconds=1) as live:
            answers.append(logprobs(await sample(engine, live)))
    assert answers[0] == answers[1] == answers[2]


async def test_the_staged_file_is_neither_written_nor_needed_by_a_loaded_adapter(
    engine: VllmEngine, registry: AdapterRegistry, adapters: AdapterMaker
) -> None:
    """Fault 21: overwriting the received bytes after the commit changes no answer."""
    ref, path = adapters.make(seed=7)
    weights = path / "adapter_model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).digest()
    await registry.commit(ref, path)
    assert hashlib.sha256(weights.read_bytes()).digest() == digest
    async with registry.admit(Selector(Rule.LATEST, "default"), wait_seconds=1) as live:
        before = logprobs(await sample(engine, live))
        with weights.open("r+b") as file:
            file.write(bytes(weights.stat().st_size))
        assert logprobs(await sample(engine, live)) == before


async def test_slots_and_directories_level_off_over_many_versions(
    engine: VllmEngine, registry: AdapterRegistry, adapters: AdapterMaker
) -> None:
    """Fault 27: forty versions leave two loaded, two directories and the newest served."""
    made = [adapters.make(seed=seed) for seed in range(40)]
    for ref, path in made:
        await registry.commit(ref, path)
    async with asyncio.timeout(10):
        await registry._wait(lambda: len(registry._live) == 2, 10, TimeoutError)
    assert registry.listing() == [ref for ref, _ in made[-2:]]
    assert len(await engine._llm.list_loras()) == 2
    assert [path.exists() for _, path in made] == [False] * 38 + [True] * 2


async def test_closing_a_generation_ends_it_in_the_engine(engine: VllmEngine) -> None:
    generation = Generation(
        request_id="closed",
        prompt_token_ids=PROMPT,
        sampling=replace(GREEDY, max_tokens=900),
        adapter=None,
        cache_salt="base",
    )
    async with aclosing(engine.generate(generation)) as deltas:
        await anext(deltas)
    assert engine._llm.get_num_unfinished_requests() == 0


async def test_several_completions_each_end_once(engine: VllmEngine) -> None:
    sampling = Sampling(n=3, max_tokens=8, seed=3, ignore_eos=True)
    deltas = await sample(engine, None, sampling=sampling)
    by_index = [[delta for delta in deltas if delta.index == index] for index in range(3)]
    assert [len(tokens(part)) for part in by_index] == [8, 8, 8]
    assert [len(logprobs(part)) for part in by_index] == [8, 8, 8]
    assert len({tokens(part) for part in by_index}) == 3
    for part in by_index:
        assert [delta.finish_reason for delta in part].count(FinishReason.LENGTH) == 1


async def test_text_and_chat_are_tokenized_as_the_model_wants_them(engine: VllmEngine) -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.decode(engine.encode_text("hi")) == "hi"
    chat = engine.encode_chat([Message("user", "hi"), Message("assistant", "yo")])
    assert tokenizer.decode(chat) == "user:hi;assistant:yo;assistant:"


async def test_a_stop_token_ends_a_completion(engine: VllmEngine) -> None:
    answer = tokens(await sample(engine, None))
    sampling = replace(GREEDY, stop_token_ids=(answer[5],))
    stopped = await sample(engine, None, sampling=sampling)
    assert tokens(stopped) == answer[: answer.index(answer[5]) + 1]
    assert stopped[-1].finish_reason is FinishReason.STOP


async def test_a_pause_freezes_generation_and_changes_nothing(engine: VllmEngine) -> None:
    undisturbed = await sample(engine, None)
    await engine.pause()
    running = asyncio.create_task(sample(engine, None))
    done, _ = await asyncio.wait([running], timeout=0.3)
    assert not done
    await engine.resume()
    paused = await running
    assert (tokens(paused), logprobs(paused)) == (tokens(undisturbed), logprobs(undisturbed))


async def test_an_unknown_engine_argument_is_refused_with_the_nearest_name(
    config: RolloutConfig,
) -> None:
    """Fault 10: an unknown knob is an error, not dropped."""
    wrong = config.model_copy(update={"engine": {"max_model_length": 10}})
    with pytest.raises(ConfigError, match=r"engine\.max_model_length: .*'max_model_len'"):
        await VllmEngine.start(wrong)
