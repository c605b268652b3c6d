"""Every sampling parameter, as a real engine understands it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from common.errors import InvalidField
from rollout_svc.engine import FinishReason
from rollout_svc.generation.sampling import Sampling
from rollout_svc.vllm_engine.engine import VllmEngine
from tests.integration.rollout_engine.asking import (
    LETTERS,
    ask,
    late_word,
    logits_of,
    still_answers,
)
from tests.integration.rollout_engine.tiny import GREEDY, PROMPT, VOCAB, byte_level_tokenizer

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(180)]

SPELLING = replace(GREEDY, allowed_token_ids=LETTERS)
END = byte_level_tokenizer().eos_token_id
MODELS_END = 2
"""Of the model's own configuration, which is another."""


async def test_penalties_are_of_what_was_said_before(
    engine: VllmEngine, reference: LlamaForCausalLM
) -> None:
    """Repetition divides a positive logit and multiplies a negative one, prompt included; frequency
    and presence are subtracted, of the answer alone."""
    repetition, frequency, presence = 1.25, 0.5, 0.75
    answer = await ask(
        engine,
        replace(
            GREEDY,
            max_tokens=40,
            repetition_penalty=repetition,
            frequency_penalty=frequency,
            presence_penalty=presence,
        ),
    )
    plain = await ask(engine, replace(GREEDY, max_tokens=40))
    assert answer.token_ids != plain.token_ids
    rows = logits_of(reference, PROMPT + answer.token_ids)
    for place, token in enumerate(answer.token_ids):
        logits = rows[len(PROMPT) + place - 1].clone()
        said = list(set(PROMPT + answer.token_ids[:place]))
        logits[said] = torch.where(
            logits[said] > 0, logits[said] / repetition, logits[said] * repetition
        )
        for seen, count in Counter(answer.token_ids[:place]).items():
            logits[seen] -= count * frequency + presence
        assert logits.argmax() == token
        expected = logits.log_softmax(-1)[token]
        assert answer.logprobs[place] == pytest.approx(expected.item(), abs=2e-4)


async def test_a_bias_and_the_allowed_tokens_decide_what_is_sampled(engine: VllmEngine) -> None:
    biased = await ask(engine, replace(GREEDY, logit_bias=((77, 100.0),)))
    assert set(biased.token_ids) == {77}
    spelt = await ask(engine, Sampling(n=1, max_tokens=24, seed=1, allowed_token_ids=LETTERS))
    assert set(spelt.token_ids) <= set(LETTERS)
    against = tuple((token, -100.0) for token in LETTERS[1:])
    assert set((await ask(engine, replace(SPELLING, logit_bias=against))).token_ids) == {LETTERS[0]}


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"allowed_token_ids": (5, 6), "stop_token_ids": (5, 6, 7)}, [5, 6]),
        ({"allowed_token_ids": (END, MODELS_END)}, [END, MODELS_END]),
        ({"allowed_token_ids": range(9), "stop_token_ids": range(9)}, [0, 1, 2, 3, 4]),
        ({"allowed_token_ids": LETTERS[:1], "bad_words": ("a",), "min_tokens": 0}, [*LETTERS[:1]]),
        (
            {"allowed_token_ids": (5, LETTERS[0]), "bad_words": ("a",), "stop_token_ids": (5,)},
            [5, LETTERS[0]],
        ),
        ({"stop_token_ids": range(VOCAB)}, "every token"),
    ],
)
async def test_parameters_that_leave_no_token_are_refused(
    engine: VllmEngine, fields: dict[str, Any], found: object
) -> None:
    """VLLM gives token 0, with a log-probability that is no number."""
    field = "allowed_token_ids" if "allowed_token_ids" in fields else "stop_token_ids"
    async with still_answers(engine, GREEDY):
        with pytest.raises(InvalidField) as refused:
            await ask(engine, replace(GREEDY, **{"min_tokens": 2, **fields}))
    assert str(refused.value) == (
        f"sampling.{field}: {found}; what ends the answer before min_tokens, or is in bad_words, "
        "is not sampled, so nothing is left; allow another token"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": (5, 6), "stop_token_ids": (6,), "min_tokens": 24},
        {"allowed_token_ids": (5,), "stop_token_ids": (6,), "min_tokens": 24},
        # A bias bans nothing where it is all that there is.
        {"allowed_token_ids": (5,), "logit_bias": ((5, -100.0),)},
        {"allowed_token_ids": (5, 6), "logit_bias": ((5, -100.0),), "stop_token_ids": (6,)}
        | {"min_tokens": 24},
        {"allowed_token_ids": (5,), "bad_words": ("a", "&&")} | {"max_tokens": 1},
    ],
)
async def test_one_token_that_is_left_is_sampled(
    engine: VllmEngine, fields: dict[str, Any]
) -> None:
    answer = await ask(engine, replace(GREEDY, **fields))
    assert (set(answer.token_ids), set(answer.logprobs)) == ({5}, {0.0})


async def test_bad_words_are_not_said(engine: VllmEngine) -> None:
    spelt = (await ask(engine, SPELLING)).text
    (first, second), _ = Counter(pairwise(spelt)).most_common(1)[0]
    word = first + second
    other = (await ask(engine, replace(SPELLING, bad_words=(word,)))).text
    assert word in spelt
    assert word not in other
    assert len(other) == len(spelt)


async def test_a_stop_string_is_part_of_the_text_where_that_is_asked(engine: VllmEngine) -> None:
    spelt = (await ask(engine, SPELLING)).text
    stop, end = late_word(spelt, 3)
    without = await ask(engine, replace(SPELLING, stop=(stop,)))
    assert (without.text, without.finish_reason) == (spelt[:end], FinishReason.STOP)
    held = await ask(engine, replace(SPELLING, stop=(stop,), include_stop_str_in_output=True))
    assert held.text == spelt[: end + 3]
    assert held.token_ids == without.token_ids


async def test_special_tokens_are_text_where_that_is_asked(engine: VllmEngine) -> None:
    sampling = replace(GREEDY, max_tokens=2, logit_bias=((END, 100.0),))
    assert (await ask(engine, sampling)).text == ""
    assert (await ask(engine, replace(sampling, skip_special_tokens=False))).text == "<end><end>"


@pytest.mark.parametrize("count", [1, 5])
async def test_the_likeliest_tokens_are_those_of_the_model(
    engine: VllmEngine, reference: LlamaForCausalLM, count: int
) -> None:
    """As many as asked for, whether or not the sampled one is among them."""
    sampling = Sampling(n=1, max_tokens=24, seed=5, ignore_eos=True, top_logprobs=count)
    answer = await ask(engine, sampling)
    expected = logits_of(reference, PROMPT + answer.token_ids)[len(PROMPT) - 1 : -1]
    values, tokens = expected.log_softmax(-1).topk(count)
    assert [[token for token, _ in top] for top in answer.top] == tokens.tolist()
    found = torch.tensor([[logprob for _, logprob in top] for top in answer.top])
    torch.testing.assert_close(found, values, atol=2e-4, rtol=0)
    sampled = [token in dict(top) for token, top in zip(answer.token_ids, answer.top, strict=True)]
    assert not all(sampled)
    for token, logprob, top in zip(answer.token_ids, answer.logprobs, answer.top, strict=True):
        assert dict(top).get(token, logprob) == logprob


async def test_of_tokens_that_cannot_be_sampled_none_is_likely(engine: VllmEngine) -> None:
    sampling = Sampling(n=1, max_tokens=8, seed=5, top_k=2, ignore_eos=True, top_logprobs=5)
    assert [len(top) for top in (await ask(engine, sampling)).top] == [2] * 8


@pytest.mark.parametrize("max_tokens", [0, 4])
async def test_a_prompt_is_scored_by_the_models_own_distribution(
    engine: VllmEngine, reference: LlamaForCausalLM, max_tokens: int
) -> None:
    """At whatever temperature the answer is sampled, and though the prompt is in the cache."""
    prompt = tuple((11 * place) % 500 for place in range(150))
    await ask(engine, GREEDY, prompt=prompt)
    sampling = Sampling(n=1, max_tokens=max_tokens, temperature=0.5, prompt_logprobs=3)
    answer = await ask(engine, sampling, prompt=prompt)
    assert answer.scores is not None
    expected = logits_of(reference, prompt)[:-1].log_softmax(-1)
    own = expected.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(answer.scores.logprobs), own, atol=2e-4, rtol=0)
    values, tokens = expected.topk(3)
    assert [[token for token, _ in top] for top in answer.scores.top] == tokens.tolist()
    found = torch.tensor([[logprob for _, logprob in top] for top in answer.scores.top])
    torch.testing.assert_close(found, values, atol=2e-4, rtol=0)
    assert (len(answer.token_ids), answer.finish_reason) == (max_tokens, FinishReason.LENGTH)


async def test_a_prompt_of_one_token_has_no_score(engine: VllmEngine) -> None:
    sampling = Sampling(n=1, max_tokens=0, prompt_logprobs=0)
    answer = await ask(engine, sampling, prompt=(7,))
    assert (answer.scores and answer.scores.logprobs, answer.deltas) == ((), 1)


async def test_several_completions_score_their_prompt_once(engine: VllmEngine) -> None:
    sampling = Sampling(n=3, max_tokens=4, seed=1, ignore_eos=True, prompt_logprobs=0)
    scores = [(await ask(engine, sampling, index=index)).scores for index in range(3)]
    assert sum(score is not None for score in scores) >= 1
    assert {len(score.logprobs) for score in scores if score} == {len(PROMPT) - 1}


async def test_what_vllm_itself_refuses_names_the_field(engine: VllmEngine) -> None:
    with pytest.raises(InvalidField, match=r"^sampling\.bad_words: [^\n]*Too many bad words"):
        words = tuple(f"word {number}" for number in range(2000))
        await ask(engine, replace(GREEDY, bad_words=words))


async def test_final_only_gives_the_same_in_two_deltas(engine: VllmEngine) -> None:
    """The first token when it is there, for whoever measures, and the rest at the end."""
    sampling = Sampling(n=2, max_tokens=24, seed=3, ignore_eos=True, top_logprobs=2)
    for index in (0, 1):
        streamed = await ask(engine, sampling, index=index)
        final = await ask(engine, sampling, index=index, final_only=True)
        assert final.deltas <= 2 < streamed.deltas
        assert replace(final, deltas=0) == replace(streamed, deltas=0)
