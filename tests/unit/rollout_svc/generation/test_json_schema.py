"""Which JSON schemas bind a text, and which xgrammar would keep it to in part only."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar

from rollout_svc.generation.json_schema import refusal


def fault(schema: Any) -> str:
    """What is named in the refusal."""
    reason = refusal(json.loads(json.dumps(schema)))
    start, end = "xgrammar keeps no text to ", "; leave it out, or say it otherwise"
    assert reason == "" or (reason.startswith(start) and reason.endswith(end))
    return reason.removeprefix(start).removesuffix(end)


NAMED = {"type": "object", "properties": {"a": {}}}
TEXT = {"type": "string"}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": ["integer", "null"], "minimum": 0, "exclusiveMaximum": 10},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 3},
            },
            "required": ["value"],
            "additionalProperties": False,
        },
    },
}
PETS = {
    "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
    "discriminator": {"propertyName": "kind"},
    "$defs": {
        name: {
            "type": "object",
            "properties": {"kind": {"const": name, "type": "string"}, "name": TEXT},
            "required": ["kind"],
        }
        for name in ("cat", "dog")
    },
}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"title": "any", "description": "anything", "default": {"not": {}}, "x-own": 1},
        {"type": "object", "properties": {"not": TEXT, "if": TEXT}, "required": ["not"]},
        {"properties": {"a": TEXT}, "required": ["a"], "additionalProperties": {"type": "integer"}},
        {"type": "object", "patternProperties": {"^a": TEXT}, "minProperties": 1},
        {"type": "object", "propertyNames": {"type": "string", "pattern": "^a"}},
        {"type": "array", "prefixItems": [TEXT, {"const": None}], "items": False, "minItems": 1},
        {"type": "string", "minLength": 1, "maxLength": 5},
        {"type": "integer", "minLength": 1},
        {"type": "string", "enum": ["a", "b"]},
        {"type": "number", "const": 1},
        {"type": ["string", "null"], "anyOf": [TEXT, {"type": "null"}]},
        {"type": "object", "anyOf": [{"properties": {"a": TEXT}}, NAMED]},
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": TEXT}, "description": "a"},
        {"anyOf": [{"$ref": "#"}, TEXT]},
        {"oneOf": [TEXT, {"type": "number"}, {"enum": [None, True]}, {"type": "object"}]},
        {"oneOf": [{"const": 1}, {"enum": [True, "1", 2]}]},
        TREE,
        PETS,
    ],
)
def test_what_xgrammar_keeps_a_text_to_is_taken(schema: Any) -> None:
    assert fault(schema) == ""


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {}}, "'not'"),
        ({**TEXT, "if": {"minLength": 2}, "then": {"maxLength": 3}}, "'if'"),
        ({**NAMED, "dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
        ({**NAMED, "dependentSchemas": {"a": {}}}, "'dependentSchemas'"),
        ({**NAMED, "dependencies": {"a": ["b"]}}, "'dependencies'"),
        ({"type": "integer", "multipleOf": 3}, "'multipleOf'"),
        ({"items": {}, "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "array", "contains": TEXT}, "'contains'"),
        ({"$dynamicRef": "#a"}, "'$dynamicRef'"),
        ({"$ref": "#/$defs/a", "minLength": 2, "$defs": {"a": TEXT}}, "'minLength' beside '$ref'"),
        ({"const": 1, "enum": [2]}, "'enum' beside 'const'"),
        ({**NAMED, "anyOf": [NAMED]}, "'properties' beside 'anyOf'"),
        ({"allOf": [TEXT, {"enum": ["a"]}]}, "'allOf' of several schemas"),
        ({**NAMED, "required": ["a", "b"]}, "'required' 'b' without its 'properties'"),
        ({**TEXT, "pattern": "a", "maxLength": 2}, "'pattern' beside 'maxLength'"),
        ({**TEXT, "pattern": "a", "format": "date"}, "'pattern' beside 'format'"),
        ({**NAMED, "patternProperties": {"a": {}}}, "'patternProperties' beside 'properties'"),
        (
            {"type": "object", "propertyNames": TEXT, "additionalProperties": False},
            "'propertyNames' beside 'additionalProperties'",
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}, "'not'"),
    ],
)
def test_what_it_would_pass_over_is_named(schema: Any, named: str) -> None:
    assert fault(schema) == named


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    """For a vocabulary of one token a printable character."""
    vocabulary = [*map(chr, range(32, 127)), "<end>"]
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[95]))


@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        ({"not": {}}, "1"),
        ({**TEXT, "if": {}, "then": {"maxLength": 1}}, '"ab"'),
        ({**NAMED, "dependentRequired": {"a": ["b"]}}, '{"a":1}'),
        ({"type": "number", "multipleOf": 3}, "4"),
        ({"type": "array", "items": {}, "uniqueItems": True}, "[1,1]"),
        ({"type": "array", "items": {}, "contains": TEXT}, "[1]"),
        ({"$ref": "#/$defs/a", "minLength": 2, "$defs": {"a": TEXT}}, '"a"'),
        ({"const": 1, "enum": [2]}, "1"),
        ({**NAMED, "anyOf": [{"type": "object", "required": ["a"]}]}, "{}"),
        ({"allOf": [TEXT, {"enum": ["a"]}]}, '"b"'),
        ({**NAMED, "required": ["b"]}, '{"a":1}'),
        ({**TEXT, "pattern": "a+", "maxLength": 2}, '"aaa"'),
        ({"type": "object", "propertyNames": TEXT, "additionalProperties": False}, '{"a":1}'),
    ],
)
def test_xgrammar_lets_through_what_the_schema_does_not(
    compiler: xgrammar.GrammarCompiler, schema: Any, wrong: str
) -> None:
    """Where a newer one does not any more, the schema can be taken."""
    matcher = xgrammar.GrammarMatcher(
        compiler.compile_json_schema(json.dumps(schema)), terminate_without_stop_token=True
    )
    assert matcher.accept_string(wrong)
    assert refusal(schema)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: {"type": "object", "properties": {"a": inner}},
        lambda inner: {"type": "object", "patternProperties": {"a": inner}},
        lambda inner: {"type": "object", "additionalProperties": inner},
        lambda inner: {"type": "object", "unevaluatedProperties": inner},
        lambda inner: {"type": "object", "propertyNames": inner},
        lambda inner: {"type": "array", "items": inner},
        lambda inner: {"type": "array", "unevaluatedItems": inner},
        lambda inner: {"type": "array", "prefixItems": [inner]},
        lambda inner: {"anyOf": [TEXT, inner]},
        lambda inner: {"oneOf": [TEXT, inner]},
        lambda inner: {"allOf": [inner]},
        lambda inner: {"$ref": "#/definitions/a", "definitions": {"a": inner}},
    ],
)
def test_it_is_found_wherever_it_stands(wrap: Any) -> None:
    assert fault(wrap({"type": "boolean", "not": {}})) == "'not'"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nothing"},
        {"type": "object", "properties": [], "required": "a"},
        {"anyOf": [1, None], "$defs": 3},
        {"enum": [float("nan"), float("inf")], "type": "number"},
        {"$ref": "#/absent"},
        {"oneOf": [{"const": []}]},
        {"enum": 3},
        {"type": ["string", {}], "minProperties": "a"},
        {"type": "array", "items": [1], "prefixItems": 3},
        1,
    ],
)
def test_what_is_no_schema_is_left_to_xgrammar(schema: Any) -> None:
    assert fault(schema) == ""


def test_a_deep_schema_is_read_to_its_end() -> None:
    schema: Any = {"not": {}}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    assert refusal(schema).startswith("xgrammar keeps no text to 'not'; ")
