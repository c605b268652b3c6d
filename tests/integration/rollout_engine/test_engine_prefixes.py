"""An aborted answer that goes on is the answer that was not aborted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import InvalidField
from rollout_svc.engine import FinishReason
from rollout_svc.vllm_engine.engine import VllmEngine
from tests.integration.rollout_engine.asking import LETTERS, ask, late_word
from tests.integration.rollout_engine.tiny import GREEDY, PROMPT, byte_level_tokenizer

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(180)]

SPELLING = replace(GREEDY, max_tokens=40, allowed_token_ids=LETTERS)


@pytest.mark.parametrize("cut", [1, 12, 13, 31, 39])
async def test_an_answer_goes_on_as_it_would_have(engine: VllmEngine, cut: int) -> None:
    """Also where the prefix fills the cache's last block: 20 of prompt and 12 are one of 32."""
    for sampling in (replace(GREEDY, max_tokens=40, top_logprobs=2), SPELLING):
        whole = await ask(engine, sampling)
        rest = await ask(engine, sampling, prefix=whole.token_ids[:cut])
        assert rest.token_ids == whole.token_ids[cut:]
        assert rest.logprobs == pytest.approx(whole.logprobs[cut:], abs=1e-4)
        assert len(rest.top) == len(whole.top[cut:])
        assert rest.finish_reason is FinishReason.LENGTH
    assert rest.text == whole.text[cut:]


async def test_the_least_number_of_tokens_counts_the_prefix(engine: VllmEngine) -> None:
    whole = await ask(engine, GREEDY)
    stop = whole.token_ids[3]
    sampling = replace(GREEDY, stop_token_ids=(stop,), min_tokens=6)
    expected = await ask(engine, sampling)
    for cut in (1, len(expected.token_ids) - 1):
        rest = await ask(engine, sampling, prefix=expected.token_ids[:cut])
        assert expected.token_ids[:cut] + rest.token_ids == expected.token_ids
        assert rest.finish_reason is expected.finish_reason


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("before", [-1, 0, 1, 3, 4])
async def test_a_stop_string_ends_the_answer_wherever_it_was_cut(
    engine: VllmEngine, before: int, included: bool
) -> None:
    """`before`: so many letters of the stop string were in the aborted answer."""
    spelt = await ask(engine, SPELLING)
    stop, begin = late_word(spelt.text, 5)
    sampling = replace(SPELLING, stop=("zzz", stop), include_stop_str_in_output=included)
    expected = await ask(engine, sampling)
    assert expected.finish_reason is FinishReason.STOP
    cut = begin + before
    rest = await ask(engine, sampling, prefix=spelt.token_ids[:cut])
    assert spelt.token_ids[:cut] + rest.token_ids == expected.token_ids
    assert len(rest.logprobs) == len(rest.token_ids)
    assert rest.finish_reason is FinishReason.STOP
    # What was sent of it before stays sent.
    sent = spelt.text[:cut]
    assert sent + rest.text == (
        spelt.text[: begin + 5] if included else spelt.text[: max(begin, cut)]
    )
    assert engine.llm.get_num_unfinished_requests() == 0


async def test_a_prefix_that_had_come_to_its_end_is_refused(engine: VllmEngine) -> None:
    spelt = await ask(engine, SPELLING)
    with pytest.raises(InvalidField, match=r"^prefix_token_ids: they hold the stop string"):
        await ask(
            engine,
            replace(SPELLING, stop=(spelt.text[3:6],)),
            prefix=spelt.token_ids[:10],
        )


async def test_a_character_that_was_cut_comes_whole(engine: VllmEngine) -> None:
    """Its first byte was in the prefix, whose text it was not part of."""
    first, second = byte_level_tokenizer().encode("é")
    sampling = replace(GREEDY, max_tokens=3, allowed_token_ids=(second,))
    for stops in ((), ("zz",)):
        rest = await ask(engine, replace(sampling, stop=stops), prefix=(LETTERS[0], first))
        assert (rest.text, rest.token_ids) == ("é", (second,))


async def test_a_continued_answer_comes_once_where_that_is_asked(engine: VllmEngine) -> None:
    whole = await ask(engine, SPELLING)
    rest = await ask(engine, SPELLING, prefix=whole.token_ids[:5], final_only=True)
    assert (rest.text, rest.token_ids) == (whole.text[5:], whole.token_ids[5:])
    assert rest.deltas <= 2
    assert len(PROMPT) + 5 < 32
