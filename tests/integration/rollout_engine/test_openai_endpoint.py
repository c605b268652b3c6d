"""The OpenAI Python client against the endpoint on a real engine."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI
from transformers import LlamaForCausalLM

from common.rules import Merge, Rules, Swap
from common.stream.content import Content
from rollout_svc.config import RolloutConfig
from rollout_svc.generation.requests import RunningRequests
from rollout_svc.metrics import Metrics
from rollout_svc.openai_api.server import openai_served
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.vllm_engine.engine import VllmEngine
from tests.eventually import eventually
from tests.integration.rollout_engine.tiny import (
    PROMPT,
    AdapterMaker,
    byte_level_tokenizer,
    expected_logprobs,
)

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(120)]
MESSAGES: Any = [{"role": "user", "content": "Hello"}]
IDS: Any = {"return_token_ids": True}


@dataclass(frozen=True, slots=True)
class Endpoint:
    client: AsyncOpenAI
    http: httpx.AsyncClient
    requests: RunningRequests
    metrics: Metrics

    async def complete(self, model: str, **fields: Any) -> Any:
        """24 greedy tokens of a completion of `PROMPT`, with log-probabilities."""
        asked: dict[str, Any] = {"prompt": list(PROMPT), "max_tokens": 24, "logprobs": 0}
        asked |= {"temperature": 0.0, "extra_body": IDS | {"ignore_eos": True}}
        return await self.client.completions.create(model=model, **(asked | fields))


@asynccontextmanager
async def serving(
    config: RolloutConfig, engine: VllmEngine, registry: AdapterRegistry, **arguments: Any
) -> AsyncIterator[Endpoint]:
    """With `arguments` of vLLM's server."""
    requests, metrics = RunningRequests(engine.abort, max_requests=4), Metrics()
    served = openai_served(
        config.model_copy(update={"openai_port": 0, "openai_args": arguments}),
        engine,
        registry=registry,
        requests=requests,
        metrics=metrics,
    )
    async with served as url:
        assert url is not None
        async with (
            AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            httpx.AsyncClient(base_url=url) as http,
        ):
            yield Endpoint(client, http, requests, metrics)


@pytest_asyncio.fixture(loop_scope="package")
async def endpoint(
    config: RolloutConfig, engine: VllmEngine, registry: AdapterRegistry
) -> AsyncIterator[Endpoint]:
    async with serving(config, engine, registry) as endpoint:
        yield endpoint


@pytest_asyncio.fixture(loop_scope="package")
async def calling(
    config: RolloutConfig, engine: VllmEngine, registry: AdapterRegistry
) -> AsyncIterator[Endpoint]:
    """One that reads tool calls."""
    parser: Any = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    async with serving(config, engine, registry, **parser) as endpoint:
        yield endpoint


async def commit(
    registry: AdapterRegistry, adapters: AdapterMaker, *, seed: int, rules: Rules | None = None
) -> Path:
    """The version's directory."""
    content, path = adapters.make(seed=seed)
    if rules:
        content = Content.whole(content.ref, content.manifest, content.buffer, rules=rules)
    await registry.commit(content, path, source="trainer")
    return path


async def test_each_model_name_is_answered_by_its_own_weights(
    endpoint: Endpoint,
    registry: AdapterRegistry,
    adapters: AdapterMaker,
    reference: LlamaForCausalLM,
) -> None:
    """faults.md 1 and 2, verl#7495 and verl#3821: never the base by silence."""
    first = await commit(registry, adapters, seed=1)
    second = await commit(registry, adapters, seed=2)
    expected = {
        "base": ("base", None),
        "default@1": ("default@1", first),
        "default@2": ("default@2", second),
        "default": ("default@2", second),
    }
    for asked, (name, path) in expected.items():
        answer = await endpoint.complete(asked)
        [choice] = answer.choices
        assert answer.model == name
        assert (len(choice.token_ids), choice.finish_reason) == (24, "length")
        right = expected_logprobs(reference, path, PROMPT, tuple(choice.token_ids))
        found = torch.tensor(choice.logprobs.token_logprobs)
        assert torch.allclose(found, right, atol=1e-4), (found - right).abs().max()


async def test_this_services_warnings_are_logged_on(endpoint: Endpoint) -> None:
    """vLLM's server would have the whole process log errors alone."""
    assert logging.root.level == logging.WARNING


async def test_a_chat_has_the_log_probabilities_that_were_sampled_from(
    endpoint: Endpoint,
    registry: AdapterRegistry,
    adapters: AdapterMaker,
    reference: LlamaForCausalLM,
) -> None:
    """faults.md 18: at temperature 0.7, of the processed distribution."""
    path = await commit(registry, adapters, seed=1)
    answer: Any = await endpoint.client.chat.completions.create(
        model="default",
        messages=MESSAGES,
        temperature=0.7,
        max_tokens=12,
        seed=5,
        logprobs=True,
        top_logprobs=3,
        extra_body=IDS | {"ignore_eos": True},
    )
    [choice] = answer.choices
    prompt, tokens = tuple(answer.prompt_token_ids), tuple(choice.token_ids)
    assert answer.model == "default@1"
    right = expected_logprobs(reference, path, prompt, tokens, temperature=0.7)
    found = torch.tensor([item.logprob for item in choice.logprobs.content])
    assert torch.allclose(found, right, atol=1e-4), (found - right).abs().max()
    assert [len(item.top_logprobs) for item in choice.logprobs.content] == [3] * 12


async def test_a_stream_says_in_every_chunk_which_version_made_it(
    endpoint: Endpoint, registry: AdapterRegistry, adapters: AdapterMaker
) -> None:
    await commit(registry, adapters, seed=1)
    asked: Any = {"messages": MESSAGES, "temperature": 0.0, "max_tokens": 12}
    whole = await endpoint.client.chat.completions.create(model="default@1", **asked)
    chunks = await endpoint.client.chat.completions.create(model="default", stream=True, **asked)
    parts = [(chunk.model, chunk.choices[0].delta.content or "") async for chunk in chunks]
    assert {model for model, _ in parts} == {"default@1"}
    assert "".join(text for _, text in parts) == whole.choices[0].message.content
    assert len(parts) > 4


async def test_unknown_models_and_versions_are_not_found(
    endpoint: Endpoint, registry: AdapterRegistry, adapters: AdapterMaker
) -> None:
    """faults.md 2 and 8: verl#3821, vllm#55193."""
    await commit(registry, adapters, seed=1)
    for model in ("other", "default@2", "default@0", "@1", "tiny"):
        with pytest.raises(openai.NotFoundError, match="not served") as caught:
            await endpoint.complete(model)
        assert caught.value.param == "model"
    nobody: Any
    for nobody in ("", None):
        with pytest.raises(openai.BadRequestError, match="model: missing"):
            await endpoint.complete(nobody)


async def test_the_listed_models_are_those_that_are_live(
    endpoint: Endpoint, registry: AdapterRegistry, adapters: AdapterMaker
) -> None:
    assert [model.id async for model in endpoint.client.models.list()] == ["base"]
    for seed in (1, 2, 3):
        await commit(registry, adapters, seed=seed)
    listed = [model.id async for model in endpoint.client.models.list()]
    assert listed == ["base", "default", "default@3", "default@2"]


async def test_nothing_changes_the_engine_from_here(endpoint: Endpoint) -> None:
    for path in FORBIDDEN:
        answer = await endpoint.http.post(path, json={"lora_name": "x", "lora_path": "/x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404), path
        assert (await endpoint.http.get(path)).status_code == 404, path


FORBIDDEN = [
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/adapters",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/update_weights",
    "/init_weight_transfer_engine",
    "/pause",
    "/resume",
    "/start_profile",
    "/stop_profile",
    "/scale_elastic_ep",
    "/server_info",
    "/invocations",
    "/inference/v1/generate",
    "/v1/responses",
    "/docs",
    "/openapi.json",
    "/v1/chat/completions/",
    "/v1/chat/completions/batch",
]


async def test_the_paths_that_vllms_users_know(
    endpoint: Endpoint, registry: AdapterRegistry, adapters: AdapterMaker
) -> None:
    await commit(registry, adapters, seed=1)
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert (await endpoint.http.get(path)).status_code == 200, path
    for model, status in (("default", 200), ("default@1", 200), ("base", 200), ("other", 404)):
        answer = await endpoint.http.post("/tokenize", json={"model": model, "prompt": "ab"})
        assert answer.status_code == status, (model, answer.text)
        if status == 200:
            assert answer.json()["count"] == 2


async def test_prompts_choices_and_constraints_as_vllm_gives_them(
    endpoint: Endpoint, registry: AdapterRegistry, adapters: AdapterMaker
) -> None:
    await commit(registry, adapters, seed=1)
    alone = await endpoint.complete("default", prompt=[[5, 6, 7]])
    both = await endpoint.complete("default", prompt=[[5, 6, 7], list(PROMPT)])
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].token_ids == alone.choices[0].token_ids
    several = await endpoint.complete("default", prompt=[[5, 6, 7], [8]], n=2, temperature=1.0)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in several.choices}) == 4
    salted = {"cache_salt": "mine", "ignore_eos": True, **IDS}
    again = await endpoint.complete("default", prompt=[[5, 6, 7]], extra_body=salted)
    assert again.choices[0].token_ids == alone.choices[0].token_ids
    choice = {"structured_outputs": {"choice": ["left", "right"]}}
    chat = await endpoint.client.chat.completions.create(
        model="default", messages=MESSAGES, max_tokens=8, extra_body=choice
    )
    assert chat.choices[0].message.content in ("left", "right")


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


async def test_an_aborting_update_ends_requests_with_what_they_have(
    endpoint: Endpoint, registry: AdapterRegistry, adapters: AdapterMaker
) -> None:
    await commit(registry, adapters, seed=1)
    task = asyncio.create_task(endpoint.complete("default", max_tokens=900, prompt=[[5], [6]]))
    await eventually(lambda: registry.uses, seconds=10)
    await commit(registry, adapters, seed=2, rules=Rules(swap=Swap.ABORT))
    answer = await task
    assert answer.model == "default@1"
    assert [choice.finish_reason for choice in answer.choices] == ["abort", "abort"]
    assert all(len(choice.token_ids) < 900 for choice in answer.choices)


async def test_a_request_that_goes_on_under_the_next_version_names_it(
    endpoint: Endpoint, registry: AdapterRegistry, adapters: AdapterMaker
) -> None:
    await commit(registry, adapters, seed=1)
    whole = asyncio.create_task(endpoint.complete("default", max_tokens=200))
    stream = await endpoint.complete("default", max_tokens=200, stream=True)
    models: list[str] = []
    async for chunk in stream:
        models.append(chunk.model)
        if len(models) == 10:
            await commit(registry, adapters, seed=2, rules=Rules(swap=Swap.CONTINUE))
    assert models == sorted(models)
    assert list(dict.fromkeys(models)) == ["default@1", "default@2"]
    assert (await whole).model == "default@2"
    assert len((await whole).choices[0].token_ids) == 200


async def test_merged_weights_answer_by_their_versions_name_and_no_base_is_left(
    endpoint: Endpoint,
    registry: AdapterRegistry,
    adapters: AdapterMaker,
    engine: VllmEngine,
    model_dir: Path,
    reference: LlamaForCausalLM,
) -> None:
    """faults.md 15, miles#1087: the adapter is not applied on top of itself."""
    try:
        path = await commit(registry, adapters, seed=1, rules=Rules(merge=Merge.ROLLOUT))
        answer = await endpoint.complete("default")
        [choice] = answer.choices
        assert answer.model == "default@1"
        right = expected_logprobs(reference, path, PROMPT, tuple(choice.token_ids))
        found = torch.tensor(choice.logprobs.token_logprobs)
        assert torch.allclose(found, right, atol=1e-4), (found - right).abs().max()
        listed = [model.id async for model in endpoint.client.models.list()]
        assert listed == ["default", "default@1"]
        with pytest.raises(openai.NotFoundError, match="merged weights"):
            await endpoint.complete("base")
    finally:
        await engine.merge(None, base=model_dir)


async def test_limits_and_drain_hold_for_it(
    endpoint: Endpoint, registry: AdapterRegistry, adapters: AdapterMaker
) -> None:
    await commit(registry, adapters, seed=1)
    running = [asyncio.create_task(endpoint.complete("base", max_tokens=900)) for _ in range(4)]
    await eventually(lambda: len(registry.uses) == 4, seconds=10)
    with pytest.raises(openai.RateLimitError, match="max_requests") as caught:
        await endpoint.complete("default")
    assert caught.value.response.headers["retry-after"] == "1"
    await endpoint.requests.drain(grace_seconds=0.0)
    assert {(await task).choices[0].finish_reason for task in running} == {"abort"}
    with pytest.raises(openai.InternalServerError, match="shutting down") as gone:
        await endpoint.complete("default")
    assert gone.value.status_code == 503


async def test_a_client_that_goes_away_frees_the_engine(
    endpoint: Endpoint, registry: AdapterRegistry, engine: VllmEngine
) -> None:
    task = asyncio.create_task(endpoint.complete("base", max_tokens=900))
    await eventually(lambda: engine.llm.output_processor.request_states, seconds=10)
    task.cancel()
    await eventually(lambda: not registry.uses, seconds=5)
    assert not engine.llm.output_processor.request_states
