"""Generation and scoring by a real engine."""

from __future__ import annotations

import asyncio
import multiprocessing
import shutil
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from common.errors import ConfigError, InvalidField
from rollout_svc.config import RolloutConfig
from rollout_svc.engine import EngineDead, FinishReason, Generation, Message
from rollout_svc.generation.sampling import Sampling
from rollout_svc.vllm_engine.engine import VllmEngine
from tests.integration.rollout_engine.tiny import (
    GREEDY,
    PROMPT,
    RANK,
    VOCAB,
    byte_level_tokenizer,
    expected_logprobs,
    logprobs,
    sample,
    tokens,
)

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(180)]


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
    assert engine.llm.get_num_unfinished_requests() == 0


async def test_an_abort_ends_the_completions_that_have_not_finished(engine: VllmEngine) -> None:
    sampling = Sampling(n=3, max_tokens=64, seed=3, ignore_eos=True)
    whole = await sample(engine, None, sampling=sampling)
    answers = [tokens([delta for delta in whole if delta.index == index]) for index in range(3)]
    only_the_firsts = next(
        token for token in answers[0][2:] if token not in answers[1] + answers[2]
    )
    generation = Generation(
        request_id="aborted",
        prompt_token_ids=PROMPT,
        sampling=replace(sampling, max_tokens=900, stop_token_ids=(only_the_firsts,)),
        adapter=None,
        cache_salt="base",
    )
    parts = []
    async with asyncio.timeout(30), aclosing(engine.generate(generation)) as deltas:
        async for delta in deltas:
            parts.append(delta)
            if delta.finish_reason is FinishReason.STOP:
                await engine.abort("aborted")
    for index in range(3):
        mine = [delta for delta in parts if delta.index == index]
        reasons = [delta.finish_reason for delta in mine if delta.finish_reason]
        assert reasons == [FinishReason.ABORT if index else FinishReason.STOP]
        assert tokens(mine)[:64] == answers[index][: len(tokens(mine))]
        assert len(logprobs(mine)) == len(tokens(mine)) > 0
    assert engine.llm.get_num_unfinished_requests() == 0


async def test_an_abort_ends_a_request_that_a_pause_holds(engine: VllmEngine) -> None:
    generation = Generation(
        request_id="held", prompt_token_ids=PROMPT, sampling=GREEDY, adapter=None, cache_salt="base"
    )
    await engine.pause()
    try:
        async with asyncio.timeout(10), aclosing(engine.generate(generation)) as deltas:
            held = asyncio.ensure_future(anext(deltas))
            await asyncio.sleep(0.1)
            assert not held.done()
            await engine.abort("held")
            assert (await held).finish_reason is FinishReason.ABORT
    finally:
        await engine.resume()


async def test_an_abort_of_an_unknown_request_does_nothing(engine: VllmEngine) -> None:
    await engine.abort("nobody")


async def test_scores_are_of_the_model_at_temperature_one(
    engine: VllmEngine, reference: LlamaForCausalLM
) -> None:
    """Whatever is cached of the same tokens, every one but the first is scored."""
    cached = tuple((7 * position) % VOCAB for position in range(200))
    served = await sample(engine, None, prompt=cached)
    sequence = cached + tokens(served)
    scores = torch.tensor(await engine.score(None, sequence))
    expected = expected_logprobs(reference, None, sequence[:1], sequence[1:])
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=0)
    own = torch.tensor(logprobs(served))
    torch.testing.assert_close(scores[len(cached) - 1 :], own, atol=1e-4, rtol=0)


async def test_scores_of_many_at_once_are_each_their_own(
    engine: VllmEngine, reference: LlamaForCausalLM
) -> None:
    sequences = [tuple(range(start, start + 40 + start)) for start in (0, 1, 50, 100)]
    answers = await asyncio.gather(*(engine.score(None, ids) for ids in sequences))
    for ids, scores in zip(sequences, answers, strict=True):
        expected = expected_logprobs(reference, None, ids[:1], ids[1:])
        torch.testing.assert_close(torch.tensor(scores), expected, atol=1e-4, rtol=0)


async def test_a_sequence_above_the_models_context_is_not_scored(engine: VllmEngine) -> None:
    with pytest.raises(InvalidField, match="1024"):
        await engine.score(None, (1,) * 1024)
    assert len(await engine.score(None, (1,) * 1023)) == 1022


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
    """faults.md 10: an unknown knob is an error, not dropped."""
    wrong = config.model_copy(update={"engine": {"max_model_length": 10}})
    with pytest.raises(ConfigError, match=r"engine\.max_model_length: .*'max_model_len'"):
        await VllmEngine.start(wrong)


async def test_a_start_that_fails_ends_none_but_its_own_processes(
    engine: VllmEngine, config: RolloutConfig, tmp_path: Path
) -> None:
    """No weights lie there: vLLM's processes come up before it finds out."""
    no_weights = shutil.ignore_patterns("*.safetensors")
    empty = Path(shutil.copytree(config.model, tmp_path / "model", ignore=no_weights))
    before = multiprocessing.active_children()
    with pytest.raises(EngineDead, match="Engine core initialization failed"):
        await VllmEngine.start(config.model_copy(update={"model": empty}))
    assert multiprocessing.active_children() == before
    assert tokens(await sample(engine, None))
