from __future__ import annotations

from typing import Any

import pytest
from refit.v1 import rollout_pb2

from common.errors import InvalidField
from rollout_svc.generation.sampling import Sampling, Structure, StructureKind
from rollout_svc.generation.sampling_message import sampling_from_proto

VOCAB = 100


def read(*, n: int = 1, **fields: Any) -> Sampling:
    msg = rollout_pb2.SamplingParams(**{"max_tokens": 5, **fields})
    return sampling_from_proto(msg, n=n, vocab_size=VOCAB)


def test_unset_fields_are_left_to_the_engine() -> None:
    assert read(n=0) == Sampling(n=1, max_tokens=5)


def test_every_field_arrives() -> None:
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 3,
        "min_p": 0.25,
        "seed": 7,
        "presence_penalty": -2.0,
        "frequency_penalty": 2.0,
        "repetition_penalty": 1.5,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 1,
        "top_logprobs": 20,
        "prompt_logprobs": 2,
    }
    lists: dict[str, Any] = {
        "stop": ["a"],
        "stop_token_ids": [2],
        "allowed_token_ids": [0, 99],
        "bad_words": ["b"],
    }
    known = {field.name for field in rollout_pb2.SamplingParams.DESCRIPTOR.fields}
    structures = {kind.value for kind in StructureKind}
    assert known == {*given, *lists, "logit_bias", "max_tokens", *structures}
    tuples: dict[str, Any] = {name: tuple(values) for name, values in lists.items()}
    assert read(n=4, logit_bias={3: -100.0}, **given, **lists) == Sampling(
        n=4, max_tokens=5, logit_bias=((3, -100.0),), **given, **tuples
    )


@pytest.mark.parametrize(
    ("fields", "structure"),
    [
        (
            {"json_schema": '{"type": "object"}'},
            Structure(StructureKind.JSON_SCHEMA, '{"type": "object"}'),
        ),
        ({"regex": "a+"}, Structure(StructureKind.REGEX, "a+")),
        ({"grammar": 'root ::= "a"'}, Structure(StructureKind.GRAMMAR, 'root ::= "a"')),
        (
            {"choice": rollout_pb2.Choices(texts=["yes", "no"])},
            Structure(StructureKind.CHOICE, choices=("yes", "no")),
        ),
        ({"json_object": True}, Structure(StructureKind.JSON_OBJECT)),
    ],
)
def test_a_structure_is_one_of_five(fields: dict[str, Any], structure: Structure) -> None:
    assert read(**fields).structure == structure


def test_zero_is_a_value_and_not_unset() -> None:
    sampling = read(temperature=0.0, seed=0, prompt_logprobs=0)
    assert (sampling.temperature, sampling.seed, sampling.prompt_logprobs) == (0.0, 0, 0)


def test_no_token_is_needed_to_score_a_prompt() -> None:
    assert read(max_tokens=0, prompt_logprobs=0).max_tokens == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("min_tokens", 6),
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", float("inf")),
        ("seed", -1),
        ("stop", [""]),
        ("stop", ["a"] * 65),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [VOCAB]),
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", float("nan")),
        ("logit_bias", {VOCAB: 1.0}),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [1, VOCAB]),
        ("bad_words", ["a", " "]),
        ("top_logprobs", -1),
        ("top_logprobs", 21),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("json_schema", ""),
        ("json_schema", "{"),
        ("json_schema", "[" * 100_000),
        ("json_schema", "[1]"),
        ("json_schema", "true"),
        ("json_schema", '{"not": {}}'),
        ("json_schema", '{"type": "object"' + " " * 65_536 + "}"),
        ("regex", ""),
        ("regex", "a" * 65_537),
        ("grammar", ""),
        ("choice", rollout_pb2.Choices()),
        ("choice", rollout_pb2.Choices(texts=["yes", ""])),
        ("choice", rollout_pb2.Choices(texts=["y" * 40_000] * 2)),
        ("json_object", False),
    ],
)
def test_a_bad_value_is_refused_by_the_fields_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidField, match=rf"^sampling\.{field}: [^\n]+$"):
        read(**{field: value})


@pytest.mark.parametrize("bias", [-100.5, 101.0, float("nan")])
def test_a_bad_bias_is_refused_by_its_token(bias: float) -> None:
    with pytest.raises(InvalidField, match=r"^sampling\.logit_bias\[7\]: "):
        read(logit_bias={3: 1.0, 7: bias})


@pytest.mark.parametrize(
    ("n", "fields"),
    [(-1, {}), (1025, {}), (2, {"temperature": 0.0}), (2, {"max_tokens": 0, "prompt_logprobs": 0})],
)
def test_n_is_bounded(n: int, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidField, match=f"^n: {n}"):
        read(n=n, **fields)


def test_what_a_schema_says_in_vain_is_named() -> None:
    with pytest.raises(InvalidField) as refused:
        read(json_schema='{"type": "array", "items": {"not": {"type": "null"}}}')
    assert str(refused.value) == (
        "sampling.json_schema: xgrammar keeps no text to 'not'; leave it out, or say it otherwise"
    )


def test_a_structure_ends_where_it_says() -> None:
    with pytest.raises(InvalidField, match=r"^sampling\.ignore_eos: with sampling\.regex; "):
        read(regex="a", ignore_eos=True)
