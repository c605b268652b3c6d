"""From the message of refit.v1 to `Sampling`, checked field by field."""

from __future__ import annotations

import json
import math
from typing import Any

from refit.v1 import rollout_pb2

from common.errors import InvalidField
from rollout_svc.generation.json_schema import refusal
from rollout_svc.generation.sampling import OPTIONAL, Sampling, Structure, StructureKind

_MAX_N = 1024
# vLLM's own limit unless it is started with another.
_MAX_TOP = 20
# Every one is looked for behind every token.
_MAX_STOPS = 64
# A schema of 64 KiB compiles in seconds; what compiles for minutes takes a core from the engine.
_MAX_STRUCTURE_CHARACTERS = 64 << 10


def sampling_from_proto(msg: rollout_pb2.SamplingParams, *, n: int, vocab_size: int) -> Sampling:
    """Check every field; `n` 0 means 1.

    Raises:
        InvalidField: names the field, what was found and what it may be.
    """
    optional: dict[str, Any] = {
        name: getattr(msg, name) for name in (*OPTIONAL, "prompt_logprobs") if msg.HasField(name)
    }
    sampling = Sampling(
        n=n or 1,
        max_tokens=msg.max_tokens,
        stop=tuple(msg.stop),
        stop_token_ids=tuple(msg.stop_token_ids),
        include_stop_str_in_output=msg.include_stop_str_in_output,
        ignore_eos=msg.ignore_eos,
        min_tokens=msg.min_tokens,
        logit_bias=tuple(msg.logit_bias.items()),
        allowed_token_ids=tuple(msg.allowed_token_ids),
        bad_words=tuple(msg.bad_words),
        structure=_structure(msg),
        top_logprobs=msg.top_logprobs,
        **optional,
    )
    _check_counts(sampling)
    _check_distribution(sampling)
    _check_texts(sampling)
    _check_token_ids(sampling, vocab_size)
    _check_structure(sampling)
    return sampling


def _structure(msg: rollout_pb2.SamplingParams) -> Structure | None:
    match field := msg.WhichOneof("structured"):
        case None:
            return None
        case "choice":
            return Structure(StructureKind.CHOICE, choices=tuple(msg.choice.texts))
        case "json_object":
            if not msg.json_object:
                raise InvalidField("sampling.json_object: false; set it to true or leave it out")
            return Structure(StructureKind.JSON_OBJECT)
    return Structure(StructureKind(field), getattr(msg, field))


def _check_counts(sampling: Sampling) -> None:
    if not 1 <= sampling.n <= _MAX_N:
        raise InvalidField(f"n: {sampling.n}; ask for 1 to {_MAX_N} completions")
    if sampling.n > 1 and sampling.temperature == 0:
        raise InvalidField(f"n: {sampling.n} at temperature 0; they would be equal, so ask for 1")
    _within("top_logprobs", sampling.top_logprobs, 0, _MAX_TOP)
    _within("prompt_logprobs", sampling.prompt_logprobs, 0, _MAX_TOP)
    scores = sampling.prompt_logprobs is not None
    if sampling.max_tokens < 0 or (sampling.max_tokens == 0 and not scores):
        raise InvalidField(
            f"sampling.max_tokens: {sampling.max_tokens}; it must be at least 1, or 0 with "
            "prompt_logprobs to score the prompt alone"
        )
    if sampling.max_tokens == 0 and sampling.n > 1:
        raise InvalidField(f"n: {sampling.n} with max_tokens 0; a prompt is scored once")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise InvalidField(
            f"sampling.min_tokens: {sampling.min_tokens}; it must lie between 0 and max_tokens "
            f"({sampling.max_tokens})"
        )


def _check_distribution(sampling: Sampling) -> None:
    _within("temperature", sampling.temperature, 0.0, 2.0)
    _within("min_p", sampling.min_p, 0.0, 1.0)
    _within("top_p", sampling.top_p, 0.0, 1.0)
    _within("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _within("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    if sampling.top_p == 0.0:
        raise InvalidField("sampling.top_p: 0.0 leaves no token; it must be above 0")
    if sampling.top_k is not None and sampling.top_k < 0:
        raise InvalidField(f"sampling.top_k: {sampling.top_k}; give 0 for none, or 1 and more")
    if sampling.seed is not None and sampling.seed < 0:
        raise InvalidField(f"sampling.seed: {sampling.seed}; a seed is at least 0")
    repetition = sampling.repetition_penalty
    if repetition is not None and not 0 < repetition < math.inf:
        raise InvalidField(f"sampling.repetition_penalty: {repetition}; it must be above 0, finite")
    for token, bias in sampling.logit_bias:
        _within(f"logit_bias[{token}]", bias, -100.0, 100.0)


def _check_texts(sampling: Sampling) -> None:
    if "" in sampling.stop:
        raise InvalidField("sampling.stop: an empty string stops everything; leave it out")
    if len(sampling.stop) > _MAX_STOPS:
        raise InvalidField(
            f"sampling.stop: {len(sampling.stop)} strings; give {_MAX_STOPS} at most"
        )
    if not all(word.strip() for word in sampling.bad_words):
        raise InvalidField("sampling.bad_words: one of them is empty; leave it out")


def _check_token_ids(sampling: Sampling, vocab_size: int) -> None:
    named = {
        "stop_token_ids": sampling.stop_token_ids,
        "allowed_token_ids": sampling.allowed_token_ids,
        "logit_bias": [token for token, _ in sampling.logit_bias],
    }
    for name, tokens in named.items():
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise InvalidField(
                    f"sampling.{name}: {token}; the model's token ids are 0 to {vocab_size - 1}"
                )


def _check_structure(sampling: Sampling) -> None:
    structure = sampling.structure
    if structure is None:
        return
    name = f"sampling.{structure.kind.value}"
    if structure.kind is StructureKind.CHOICE and not all(structure.choices or ("",)):
        raise InvalidField(f"{name}: it needs at least one text, and none may be empty")
    if structure.kind in (StructureKind.GRAMMAR, StructureKind.REGEX) and not structure.source:
        raise InvalidField(f"{name}: empty; leave it out")
    size = len(structure.source) + sum(map(len, structure.choices))
    if size > _MAX_STRUCTURE_CHARACTERS:
        raise InvalidField(
            f"{name}: {size} characters; more than {_MAX_STRUCTURE_CHARACTERS} take too long to "
            "compile, so shorten it"
        )
    # A schema may be any JSON value but is an object where it says anything.
    if structure.kind is StructureKind.JSON_SCHEMA:
        _check_schema(name, structure.source)
    if sampling.ignore_eos:
        raise InvalidField(f"sampling.ignore_eos: with {name}; the text has to end where it says")


def _check_schema(name: str, source: str) -> None:
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidField(f"{name}: not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise InvalidField(f"{name}: {source[:40]}; a schema is a JSON object")
    if reason := refusal(schema):
        raise InvalidField(f"{name}: {reason}")


def _within(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not (math.isfinite(value) and low <= value <= high):
        raise InvalidField(f"sampling.{name}: {value}; it must lie between {low} and {high}")
