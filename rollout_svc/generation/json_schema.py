"""What xgrammar passes over in a JSON schema, so that a text need not keep to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_UNREAD = (
    *("not", "if", "dependentRequired", "dependentSchemas", "dependencies"),
    *("multipleOf", "uniqueItems", "contains", "minContains", "maxContains"),
    *("$dynamicRef", "$recursiveRef"),
)
_DECIDING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Of these xgrammar reads the first that is there, and no limit beside it."""

_LIMITS = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("minLength", "maxLength", "pattern", "format"),
    *("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"),
    *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
    *("propertyNames", "required", "minProperties", "maxProperties"),
)
_NOT_BOTH = (
    *(("pattern", "format"), ("pattern", "minLength"), ("pattern", "maxLength")),
    *(("format", "minLength"), ("format", "maxLength")),
    *(("propertyNames", "properties"), ("propertyNames", "patternProperties")),
    *(("propertyNames", "additionalProperties"), ("propertyNames", "unevaluatedProperties")),
    ("patternProperties", "properties"),
)
_INSIDE = (
    *("items", "unevaluatedItems", "additionalProperties", "unevaluatedProperties"),
    *("propertyNames", "prefixItems", "anyOf", "oneOf", "allOf"),
)
_INSIDE_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")


def refusal(schema: Any) -> str:
    """Why a text would not be kept to a schema; empty where nothing is known against it."""
    if fault := next(_faults(schema), ""):
        return f"xgrammar keeps no text to {fault}; leave it out, or say it otherwise"
    return ""


def _faults(root: Any) -> Iterator[str]:
    left = [root]
    while left:
        match left.pop():
            case dict() as schema:
                yield from _faults_of(schema)
                left += _inside(schema)
            case list() as schemas:
                left += schemas


def _faults_of(schema: Mapping[str, Any]) -> Iterator[str]:
    yield from (repr(name) for name in _UNREAD if name in schema)
    if deciding := next((name for name in _DECIDING if name in schema), ""):
        beside = [n for n in (*_DECIDING, *_LIMITS) if n in schema and n != deciding]
        yield from (f"{name!r} beside {deciding!r}" for name in beside)
        if deciding == "allOf" and isinstance(schema["allOf"], list) and len(schema["allOf"]) > 1:
            yield "'allOf' of several schemas"
        return
    yield from (f"{a!r} beside {b!r}" for a, b in _NOT_BOTH if a in schema and b in schema)
    required, properties = schema.get("required"), schema.get("properties", {})
    if isinstance(required, list) and isinstance(properties, dict):
        missing = (name for name in required if name not in properties)
        yield from (f"'required' {name!r} without its 'properties'" for name in missing)


def _inside(schema: Mapping[str, Any]) -> Iterator[Any]:
    yield from (schema[name] for name in _INSIDE if name in schema)
    for name in _INSIDE_BY_NAME:
        if isinstance(named := schema.get(name), dict):
            yield from named.values()
