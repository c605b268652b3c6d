"""What an answer's text is to be, held to what `Generate` holds it to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from rollout_svc.generation.json_schema import refusal


def check_structure(structure: StructuredOutputsParams | None) -> None:
    """Raises `VLLMValidationError` for a JSON schema that the text would not be kept to."""
    for schema in _schemas(structure) if structure else ():
        if reason := refusal(schema):
            raise VLLMValidationError(f"JSON schema: {reason}", parameter="structured_outputs")


def _schemas(structure: StructuredOutputsParams) -> Iterator[Any]:
    """What is no JSON is left to vLLM to refuse."""
    try:
        if structure.json is not None:
            yield json.loads(structure.json) if isinstance(structure.json, str) else structure.json
        if structure.structural_tag is not None:
            yield from _schemas_of_tags(json.loads(structure.structural_tag))
    except (ValueError, RecursionError):
        return


def _schemas_of_tags(tag: Any) -> Iterator[Any]:
    """Of tools that are `strict`, for one."""
    left = [tag]
    while left:
        match left.pop():
            case {"json_schema": dict() as schema} | {"begin": _, "schema": dict() as schema}:
                yield schema
            case dict() as inside:
                left += inside.values()
            case list() as inside:
                left += inside
