"""The OpenAI Python client against the endpoint on a real engine."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import LlamaForCausalLM

from common.rules import Merge, Rules, Swap
from rollout_svc.versions.registry import AdapterRegistry
from rollout_svc.vllm_engine.engine import VllmEngine
from tests.eventually import eventually
from tests.integration.rollout_engine.openai_client import IDS, MESSAGES, Endpoint, commit
from tests.integration.rollout_engine.tiny import (
    PROMPT,
    AdapterMaker,
    expected_logprobs,
)

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(120)]


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
