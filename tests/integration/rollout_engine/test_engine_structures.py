"""Answers whose text is bound, and requests for what cannot be."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from common.errors import InvalidField
from rollout_svc.engine import FinishReason
from rollout_svc.generation.sampling import Sampling, Structure, StructureKind
from rollout_svc.vllm_engine.engine import VllmEngine
from tests.integration.rollout_engine.asking import LETTERS, Completion, ask, still_answers
from tests.integration.rollout_engine.tiny import GREEDY

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(180)]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "odd": {"type": "boolean"}},
    "required": ["name", "odd"],
    "additionalProperties": False,
}
Kind = StructureKind


async def bound(engine: VllmEngine, structure: Structure, **more: Any) -> Completion:
    sampling = Sampling(n=1, max_tokens=200, seed=2, structure=structure, **more)
    return await ask(engine, sampling)


async def test_a_text_is_what_its_schema_says(engine: VllmEngine) -> None:
    answer = await bound(engine, Structure(Kind.JSON_SCHEMA, json.dumps(SCHEMA)))
    assert answer.finish_reason is FinishReason.STOP
    value = json.loads(answer.text)
    assert (set(value), type(value["odd"])) == ({"name", "odd"}, bool)
    assert len(value["name"]) <= 5


async def test_a_text_is_what_its_expression_says(engine: VllmEngine) -> None:
    answer = await bound(engine, Structure(Kind.REGEX, "[a-h]{3}-[0-9]{2}"))
    assert re.fullmatch("[a-h]{3}-[0-9]{2}", answer.text)


async def test_a_text_is_what_its_grammar_says(engine: VllmEngine) -> None:
    grammar = 'root ::= pair ("," pair)?\npair ::= [a-c] "=" [0-9]'
    answer = await bound(engine, Structure(Kind.GRAMMAR, grammar))
    assert re.fullmatch("[a-c]=[0-9](,[a-c]=[0-9])?", answer.text)


async def test_a_text_is_one_of_its_choices(engine: VllmEngine) -> None:
    choices = ('a "quoted" one', "back\\slash", "two\nlines")
    answer = await bound(engine, Structure(Kind.CHOICE, choices=choices))
    assert answer.text in choices


async def test_a_text_is_some_json_object(engine: VllmEngine) -> None:
    """As far as it goes: a random model closes no brace by itself."""
    answer = await bound(engine, Structure(Kind.JSON_OBJECT), logit_bias=((LETTERS[0], -50.0),))
    assert answer.text.lstrip().startswith("{")


NESTED = '{"type": "array", "items": ' * 80 + "{}" + "}" * 80


@pytest.mark.parametrize(
    "structure",
    [
        Structure(Kind.JSON_SCHEMA, '{"type": "nothing"}'),
        Structure(Kind.JSON_SCHEMA, '{"$ref": "#/definitions/absent"}'),
        Structure(Kind.JSON_SCHEMA, '{"type": "string", "pattern": "((("}'),
        Structure(Kind.JSON_SCHEMA, '{"type": "string", "minLength": 5, "maxLength": 2}'),
        # Xgrammar would ignore it.
        Structure(Kind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 3}'),
        Structure(Kind.JSON_SCHEMA, NESTED),
        Structure(Kind.REGEX, "("),
        Structure(Kind.REGEX, "[a-"),
        Structure(Kind.REGEX, "(?=a)b"),
        Structure(Kind.REGEX, "a\x00b"),
        Structure(Kind.REGEX, "(" * 20_000 + ")" * 20_000),
        Structure(Kind.GRAMMAR, "root ::= ("),
        Structure(Kind.GRAMMAR, 'other ::= "a"'),
        Structure(Kind.GRAMMAR, "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    ],
)
async def test_a_malformed_structure_is_refused_by_its_field(
    engine: VllmEngine, structure: Structure
) -> None:
    """faults.md 23: what one caller sends stops nobody else."""
    async with still_answers(engine, GREEDY):
        with pytest.raises(InvalidField, match=rf"^sampling\.{structure.kind.value}: [^\n]+$"):
            await bound(engine, structure)


async def test_a_structure_that_no_allowed_token_fits_is_refused(engine: VllmEngine) -> None:
    """faults.md 23: the engine gives that request up, and goes on with the others."""
    async with still_answers(engine, GREEDY):
        with pytest.raises(InvalidField, match=r"^sampling\.regex: .* no token fits both"):
            await bound(engine, Structure(Kind.REGEX, "[x-z]{4}"), allowed_token_ids=LETTERS)


@pytest.mark.parametrize(
    "structure",
    [
        Structure(Kind.GRAMMAR, "root ::= root"),
        Structure(Kind.GRAMMAR, 'root ::= root "a"'),
        Structure(Kind.JSON_SCHEMA, '{"$ref": "#"}'),
    ],
)
async def test_a_structure_without_a_first_token_is_refused(
    engine: VllmEngine, structure: Structure
) -> None:
    """faults.md 23: they compile; the engine finds out at the first token."""
    async with still_answers(engine, GREEDY):
        with pytest.raises(InvalidField) as refused:
            await bound(engine, structure)
    assert str(refused.value) == (
        f"sampling.{structure.kind.value}: it does not compile, or no token fits both it and the "
        "other parameters; see the replica's log"
    )


async def test_a_structure_ends_the_text_before_its_least_length(engine: VllmEngine) -> None:
    answer = await bound(engine, Structure(Kind.CHOICE, choices=("a",)), min_tokens=6)
    assert (answer.text, answer.finish_reason) == ("a", FinishReason.STOP)


async def test_a_structure_that_compiles_for_long_holds_nobody_up(engine: VllmEngine) -> None:
    """faults.md 23: 60 KiB take a core for seconds, and no step of the others."""
    names = [f"name{number}" for number in range(2300)]
    schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}}
    source = json.dumps(schema, separators=(",", ":"))
    assert 60_000 < len(source) < 64 << 10
    slow = asyncio.ensure_future(bound(engine, Structure(Kind.JSON_SCHEMA, source)))
    await ask(engine, replace(GREEDY, max_tokens=4))
    assert not slow.done()
    assert (await slow).text.lstrip().startswith("{")
