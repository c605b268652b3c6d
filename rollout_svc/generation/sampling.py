"""How a request is sampled."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class StructureKind(enum.Enum):
    """What the text of an answer is bound by; the value is the field of refit.v1."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"
    JSON_OBJECT = "json_object"


@dataclass(frozen=True, slots=True)
class Structure:
    """What the text must be.

    `source` is the schema, expression or grammar; `choices` are the texts of a choice.
    """

    kind: StructureKind
    source: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample `n` completions; None leaves a value to the engine's own default.

    `max_tokens` and `min_tokens` count the tokens of a prefix. `max_tokens` 0 samples nothing; it
    comes with `prompt_logprobs`.
    """

    n: int
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    structure: Structure | None = None
    top_logprobs: int = 0
    prompt_logprobs: int | None = None


OPTIONAL = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "skip_special_tokens",
)
"""What is None where the engine's default holds. Refit.v1 and vLLM have the same names for it."""
