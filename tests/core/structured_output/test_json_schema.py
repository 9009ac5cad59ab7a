"""simplify: schemas mean what they meant, by the validator of `jsonschema`."""

import json
from typing import Any

import jsonschema
import pytest

from servd.core.structured_output.grammar import GrammarError
from servd.core.structured_output.json_schema import simplify
from tests.core.structured_output.driver import EOS, compile_grammar, random_output

INTEGERS = {"type": "array", "items": {"type": "integer"}}
CLOSED = {"type": "object", "additionalProperties": False}
A_AND_B = {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "integer"}}


def is_allowed(schema: Any, value: Any) -> bool:
    matcher = compile_grammar("json", json.dumps(schema)).matcher()
    try:
        for token_id in [*json.dumps(value, ensure_ascii=False).encode(), EOS]:
            matcher.accept(token_id)
    except GrammarError:
        return False
    return True


@pytest.mark.parametrize(
    "format",
    ["password", "binary", "byte", "decimal", "phone", "color", "iri", "idn-email", "", "regex"],
)
def test_an_unknown_format_asks_nothing(format):
    assert is_allowed({"type": "string", "format": format}, "any text")


@pytest.mark.parametrize(("format", "value"), [("date", "2026-11-29"), ("ipv4", "10.0.0.1")])
def test_a_known_format_is_enforced(format, value):
    schema = {"properties": {"format": {"type": "string", "format": format}}}
    assert is_allowed(schema, {"format": value})
    assert not is_allowed(schema, {"format": "any text"})


@pytest.mark.parametrize(
    "dialect",
    [
        "http://json-schema.org/schema#",
        "https://json-schema.org/draft-07/schema#",
        "http://json-schema.org/draft-07/schema",
        "https://json-schema.org/draft/2020-12/schema#",
        "https://spec.openapis.org/oas/3.1/dialect/base",
        "not an address",
    ],
)
def test_any_dialect_may_be_named(dialect):
    assert is_allowed({"$schema": dialect, "type": "integer"}, 5)
    assert not is_allowed({"$schema": dialect, "type": "integer"}, "a")


@pytest.mark.parametrize(
    "name", ["Box<int>", "A B", "Über", "Page[Item]", "A|B", "100%", 'a"b', "c^d", "{T}", "日本"]
)
def test_references_may_have_any_characters(name):
    schema = {"$ref": f"#/$defs/{name}", "$defs": {name: {"type": "integer"}}}
    assert is_allowed(schema, 5) and not is_allowed(schema, "a")


@pytest.mark.parametrize(
    "keywords",
    [
        {"uniqueItems": False},
        {"maxItems": 1, "uniqueItems": True},
        {"if": {"type": "string"}},
        {"then": False, "else": False},
        {"if": {"type": "array"}, "then": True, "else": {}},
        {"minContains": 2},
        {"contains": {"type": "string"}, "minContains": 0},
        {"unevaluatedItems": True},
        {"not": False},
        {"propertyNames": {"type": "string"}},
    ],
    ids=json.dumps,
)
def test_keywords_that_ask_nothing_are_accepted(keywords):
    schema = {**INTEGERS, **keywords}
    assert jsonschema.Draft202012Validator(schema).is_valid([1])
    assert is_allowed(schema, [1]) and not is_allowed(schema, ["a"])


INTEGER_VALUES = {"type": "object", "additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize(
    "schema",
    [
        {**CLOSED, "properties": A_AND_B, "dependentRequired": {"a": ["b", "c"]}},
        {**CLOSED, "properties": A_AND_B, "dependencies": {"a": ["b"], "b": {"minProperties": 0}}},
        {**CLOSED, "properties": A_AND_B, "dependentSchemas": {"a": {"required": ["c"]}}},
        {"type": "object", "properties": A_AND_B, "unevaluatedProperties": False},
        {**INTEGER_VALUES, "propertyNames": {"enum": ["a", "b"]}},
        {**INTEGER_VALUES, "propertyNames": {"pattern": "^[ab]$"}},
        {**INTEGER_VALUES, "propertyNames": {"minLength": 1, "maxLength": 1}},
        {"type": "object", "properties": A_AND_B, "propertyNames": {"enum": ["a"]}},
        {**INTEGER_VALUES, "propertyNames": {"type": "number"}},
        {"type": "object", "properties": A_AND_B, "propertyNames": {"type": ["null"]}},
    ],
    ids=lambda schema: json.dumps(schema)[-70:],
)
def test_expanded_keywords_keep_their_meaning(schema):
    """Outputs validate, and values are told apart as the validator tells them apart."""
    validator = jsonschema.Draft202012Validator(schema)
    if "dependencies" in schema:
        validator = jsonschema.Draft7Validator(schema)
    instances: list[dict[str, Any]] = [
        {},
        {"a": 1},
        {"b": 1},
        {"c": 1},
        {"a": 1, "b": 1},
        {"a": 1, "c": 1},
        {"b": 1, "c": 1},
        {"a": 1, "b": 1, "c": 1},
        {"a": "x"},
        {"dd": 1},
    ]
    allowed = [is_allowed(schema, instance) for instance in instances]
    assert allowed == [validator.is_valid(instance) for instance in instances]
    assert True in allowed and False in allowed
    grammar = compile_grammar("json", json.dumps(schema))
    outputs = [random_output(grammar, seed) for seed in range(20)]
    texts = [output for output in outputs if output is not None]
    assert texts
    for text in texts:
        assert validator.is_valid(json.loads(text)), text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": {"const": 1}},
        {"if": {"const": 1}, "then": False},
        {"type": "object", "properties": {"a": {}}, "propertyNames": {"pattern": "a"}},
        {"type": "object", "allOf": 5, "dependentRequired": {"a": ["b"]}},
        {"type": "object", "propertyNames": {"enum": 5}},
        {"type": "object", "propertyNames": {"type": 5}},
        {"type": "object", "properties": 5, "propertyNames": {"enum": ["a"]}},
        {"type": "object", "dependentRequired": 5},
    ],
    ids=json.dumps,
)
def test_what_cannot_be_enforced_is_refused(schema):
    with pytest.raises(GrammarError, match=r"^(?!the grammar library failed)\w"):
        compile_grammar("json", json.dumps(schema))


def test_values_are_no_schemas():
    """Keywords in examples, constants and names of properties stay as they are."""
    value = {"format": "password", "uniqueItems": False, "$schema": "x", "if": {}}
    schema = {"properties": value, "enum": [value], "default": value, "const": value}
    assert simplify(schema) == {**schema, "properties": {**value, "if": {}}}


def test_schemas_inside_lark_are_simplified():
    schema = {"properties": {"a": {"type": "string", "format": "password"}}, "required": ["a"]}
    lark = f'start: "<" %json {json.dumps(schema)} ">" %json {{}} %json {{"uniqueItems": false}}'
    matcher = compile_grammar("grammar", lark).matcher()
    for token_id in b'<{"a": "b"}>1[]':
        matcher.accept(token_id)
    assert matcher.bitmask()
