"""The types of arguments that are written as text, judged by jsonschema."""

import json
from typing import Any

import jsonschema
import pytest

from servd.api.output.tool_parser import ToolParser
from servd.base import plugins
from tests.api.tool_parsers.test_parsers import read

INTEGER = {"type": "integer"}
# Schema of the parameter `a` or of all parameters, text, value.
CASES: dict[str, tuple[dict[str, Any], str, Any]] = {
    "properties": ({"properties": {"b": INTEGER}}, '{"b": 1}', {"b": 1}),
    "items": ({"items": INTEGER}, "[1]", [1]),
    "minimum": ({"minimum": 0}, "5", 5),
    "not": ({"not": {"type": "string"}}, "5", 5),
    "multipleOf": ({"multipleOf": 2}, "4", 4),
    "prefixItems": ({"prefixItems": [INTEGER]}, "[1]", [1]),
    "additionalProperties": ({"additionalProperties": INTEGER}, '{"b": 1}', {"b": 1}),
    "allOf": ({"allOf": [{"type": ["integer", "string"]}, {"type": "number"}]}, "5", 5),
    "allOf of a string": ({"allOf": [{"minLength": 1}, {"type": "string"}]}, "5", "5"),
    "reference beside a title": ({"$ref": "#/$defs/I", "title": "x", "minimum": 1}, "5", 5),
    "percent-encoded": ({"$ref": "#/$defs/Box%3Cstr%3E"}, "204", "204"),
    "escaped": ({"$ref": "#/$defs/a~1b~0"}, "204", "204"),
    "list": ({"$ref": "#/$defs/L/anyOf/1"}, "204", "204"),
    "chain": ({"$ref": "#/$defs/C"}, "5", 5),
    "options": ({"anyOf": [{"$ref": "#/$defs/I"}, {"type": "null"}]}, "null", None),
    "the same reference twice": ({"anyOf": [{"$ref": "#/$defs/I"}] * 2}, "5", 5),
    "options of texts": ({"oneOf": [{"const": "1"}, {"const": "2"}]}, "1", "1"),
    "round and round": ({"$ref": "#/$defs/R"}, "x", "x"),
    "nothing": ({}, "5", "5"),
    "pattern": ({"pattern": "5"}, "5", "5"),
}
DEFS = {
    "I": INTEGER,
    "Box<str>": {"type": "string"},
    "a/b~": {"type": "string"},
    "L": {"anyOf": [INTEGER, {"type": "string"}]},
    "C": {"allOf": [{"$ref": "#/$defs/I"}]},
    "R": {"anyOf": [{"$ref": "#/$defs/R"}, {"type": "string"}]},
}
WHOLE: dict[str, dict[str, Any]] = {
    "allOf": {"type": "object", "allOf": [{"properties": {"a": INTEGER}}]},
    "reference": {"type": "object", "$ref": "#/$defs/O"},
    "options": {"anyOf": [{"properties": {"a": INTEGER}}, {"properties": {"b": INTEGER}}]},
    "additionalProperties": {"additionalProperties": INTEGER},
    "both": {"properties": {"a": {"minimum": 1}}, "allOf": [{"$ref": "#/$defs/O"}]},
    "then": {"if": {"required": ["b"]}, "then": {"properties": {"a": INTEGER}}},
}
WRITTEN = {
    "qwen3_coder": "<tool_call><function=f><parameter=a>\n%s\n</parameter></function></tool_call>",
    "glm45": "<tool_call>f<arg_key>a</arg_key><arg_value>%s</arg_value></tool_call>",
    "seed_oss": "<seed:tool_call><function=f><parameter=a>%s</parameter></function>"
    "</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call><invoke name="f"><parameter name="a">%s</parameter>'
    "</invoke></minimax:tool_call>",
}


def value_of(parser: str, schema: dict[str, Any], text: str) -> Any:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    made = plugins.load_class("servd.api.output.tool_parsers", parser, ToolParser)([tool])
    (((_, arguments),), _) = read(made, [WRITTEN[parser] % text])
    value = json.loads(arguments)
    if "$defs" not in schema or "R" not in str(schema.get("properties")):
        jsonschema.validate(value, schema)
    return value["a"]


@pytest.mark.parametrize("parser", WRITTEN)
@pytest.mark.parametrize("title", CASES)
def test_a_value_has_the_type_of_its_schema(parser, title):
    schema, text, value = CASES[title]
    whole = {"type": "object", "properties": {"a": schema}, "$defs": DEFS}
    assert value_of(parser, whole, text) == value


@pytest.mark.parametrize("parser", WRITTEN)
@pytest.mark.parametrize("title", WHOLE)
def test_all_parts_of_the_whole_schema_count(parser, title):
    schema = WHOLE[title] | {"$defs": {"O": {"properties": {"a": INTEGER}}}}
    assert value_of(parser, schema, "5") == 5


CHAIN = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(2000)}


@pytest.mark.parametrize("reference", ["#/allOf/" + "9" * 5000, "#/$defs/d0"], ids=len)
@pytest.mark.parametrize("place", ["property", "whole"])
def test_a_reference_that_cannot_be_followed_allows_any_type(reference, place):
    schema = {"$ref": reference} if place == "whole" else {"properties": {"a": {"$ref": reference}}}
    schema = {"type": "object", "allOf": [schema], "$defs": CHAIN}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    made = plugins.load_class("servd.api.output.tool_parsers", "qwen3_coder", ToolParser)([tool])
    assert read(made, [WRITTEN["qwen3_coder"] % "x"]) == ([("f", '{"a": "x"}')], "")
