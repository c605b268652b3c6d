"""Structures, parameters and tools that the endpoint binds an answer to, or refuses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from rollout_svc.config import RolloutConfig
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.vllm_engine.engine import VllmEngine
from tests.integration.rollout_engine.openai_client import MESSAGES, Endpoint, serving
from tests.integration.rollout_engine.tiny import (
    byte_level_tokenizer,
)

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(120)]


@pytest_asyncio.fixture(loop_scope="package")
async def calling(
    config: RolloutConfig, engine: VllmEngine, registry: AdapterRegistry
) -> AsyncIterator[Endpoint]:
    """One that reads tool calls."""
    parser: Any = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    async with serving(config, engine, registry, **parser) as endpoint:
        yield endpoint


NOT_KEPT_TO = "JSON schema: xgrammar keeps no text to 'not'; leave it out, or say it otherwise"
NOTHING_LEFT = (
    "[5]; what ends the answer before min_tokens, or is in bad_words, is not sampled, so nothing "
    "is left; allow another token"
)
NO_TOKEN_FITS = (
    "it does not compile, or no token fits both it and the other parameters; see the replica's log"
)
UNBINDING: Any = {"type": "object", "properties": {"a": {"not": {}}}}


def body(reason: str, field: str) -> dict[str, Any]:
    """Of a refusal, as OpenAI's client gives it."""
    message = f"{reason} (parameter={field})"
    return {"message": message, "type": "BadRequestError", "param": field, "code": 400}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        (
            {"structured_outputs": {"json": UNBINDING}},
            body(NOT_KEPT_TO, "structured_outputs"),
        ),
        (
            {"structured_outputs": {"json": json.dumps(UNBINDING)}},
            body(NOT_KEPT_TO, "structured_outputs"),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": UNBINDING},
                }
            },
            body(NOT_KEPT_TO, "structured_outputs"),
        ),
        (
            {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2},
            body(NOTHING_LEFT, "allowed_token_ids"),
        ),
    ],
)
async def test_what_generate_refuses_is_refused_here(
    endpoint: Endpoint, fields: dict[str, Any], refusal: dict[str, Any], stream: bool
) -> None:
    """With its status, also where a stream was asked for."""
    with pytest.raises(openai.BadRequestError) as refused:
        await endpoint.complete("base", stream=stream, extra_body=fields)
    assert refused.value.body == refusal


async def test_a_structure_without_a_first_token_is_the_clients_mistake(
    endpoint: Endpoint,
) -> None:
    """faults.md 23: found at the first token; a stream has begun by then, so it is an event."""
    fields = {"structured_outputs": {"grammar": "root ::= root"}}
    with pytest.raises(openai.BadRequestError) as refused:
        await endpoint.complete("base", extra_body=fields)
    assert refused.value.body == body(NO_TOKEN_FITS, "structured_outputs")
    with pytest.raises(openai.APIError) as broken:
        [_ async for _ in await endpoint.complete("base", stream=True, extra_body=fields)]
    assert broken.value.body == body(NO_TOKEN_FITS, "structured_outputs")


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Ulm"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
SAID = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
# A random model would write spaces and further calls for ever.
BRIEF = {str(byte_level_tokenizer().eos_token_id): 100.0} | {
    str(token): -100.0 for token in byte_level_tokenizer().encode(" \t\r\n")
}


async def chat(endpoint: Endpoint, **fields: Any) -> Any:
    asked: dict[str, Any] = {"messages": MESSAGES, "tools": [TOOL], "max_completion_tokens": 200}
    return await endpoint.client.chat.completions.create(model="base", **(asked | fields))


@pytest.mark.parametrize(
    ("choice", "ending"), [("required", "tool_calls"), (NAMED, "stop")], ids=["required", "named"]
)
async def test_a_tool_that_must_be_called_is_called(
    calling: Endpoint, choice: Any, ending: str
) -> None:
    [item] = (await chat(calling, tool_choice=choice, logit_bias=BRIEF)).choices
    [call] = item.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Ulm"}
    assert item.finish_reason == ending
    stream = await chat(calling, tool_choice=choice, logit_bias=BRIEF, stream=True)
    deltas = [part.choices[0].delta async for part in stream]
    parts = [call.function for delta in deltas for call in delta.tool_calls or ()]
    assert "".join(part.name or "" for part in parts) == "weather"
    assert json.loads("".join(part.arguments or "" for part in parts)) == {"city": "Ulm"}


async def test_a_call_that_the_model_chose_is_read(calling: Endpoint) -> None:
    loose = {**TOOL, "function": {**TOOL["function"], "strict": False}}
    said = {"structured_outputs": {"choice": [SAID]}}
    [item] = (await chat(calling, tools=[loose], extra_body=said)).choices
    [call] = item.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Ulm"}')
    assert (item.finish_reason, item.message.content) == ("tool_calls", None)


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
async def test_arguments_that_would_not_be_kept_to_are_refused(
    calling: Endpoint, choice: Any
) -> None:
    tool = {**TOOL, "function": {**TOOL["function"], "parameters": UNBINDING}}
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(calling, tools=[tool], tool_choice=choice)
    assert refused.value.body == body(NOT_KEPT_TO, "structured_outputs")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            "auto",
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be '
            "set",
        ),
        ("required", 'tool_choice="required" requires --tool-call-parser to be set'),
        (NAMED, 'tool_choice=function "weather" requires --tool-call-parser to be set'),
    ],
    ids=["auto", "required", "named"],
)
async def test_tools_need_a_parser(endpoint: Endpoint, choice: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(endpoint, tool_choice=choice)
    error: Any = refused.value.body
    assert (error["message"], error["code"]) == (message, 400)
    said = {"structured_outputs": {"choice": [SAID]}}
    [item] = (await chat(endpoint, tool_choice="none", extra_body=said)).choices
    assert (item.message.content, item.message.tool_calls) == (SAID, None)
