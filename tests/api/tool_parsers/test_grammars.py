"""What grammars of forced calls let through: calls that parsers read, with valid arguments."""

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servd.api.output.call_grammar import (
    AddedTokens,
    NotExpressible,
    calls_grammar,
    parameters_of,
    properties_of,
)
from servd.api.output.model_format import ModelFormat
from servd.api.output.output_parser import ExpectedOutput
from servd.api.output.tool_parser import ForcedCallsParser, ToolParser
from servd.api.text.prompt import ToolOptions
from servd.api.text.tokenizer import Tokenizer
from servd.base import plugins
from servd.checkpoint.hub import find_model
from servd.checkpoint.model_spec import read_spec
from servd.config import Config
from servd.core.structured_output.grammar import Grammar, GrammarError
from servd.core.structured_output.vocabulary import load_vocabulary
from tests.api.tool_parsers.test_parsers import PACKAGE, PARSERS, read
from tests.core.structured_output.driver import EOS, compile_grammar

WORDS = [
    "Rome",
    "東京",
    "",
    " a\nb\n",
    "null",
    "None",
    "5",
    "true",
    'x"y',
    "it's",
    "</parameter>",
    "\\u0041\\n",
    "{",
    "<a>",
]

names = st.sampled_from(
    ["city", "days", "größe", "class", "a-b", "x", "NAME", "ARGUMENTS", "a>b", "a/b~c"]
)
strings = st.one_of(
    st.just({"type": "string"}),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        *[st.integers(0, 9)] * 2,
    ),
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(
        lambda words: {"type": "string", "enum": words}
    ),
    st.sampled_from(WORDS).map(lambda word: {"const": word}),
    st.just({"type": "string", "pattern": "^a+$"}),
)
scalars = st.sampled_from(
    [
        {},
        True,
        {"type": "integer"},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": [1, "a", None]},
        {"const": 5},
        {"type": "integer", "minimum": 3, "maximum": 12},
        {"type": ["string", "null"]},
        {"type": ["integer", "string"]},
        {"$ref": "#/$defs/City"},
        {"allOf": [{"$ref": "#/$defs/City"}]},
        {"$ref": "#/$defs/Size", "description": "a size"},
        {"type": "string", "enum": ["a", "b"], "title": "x"},
    ]
)
values = st.recursive(
    strings | scalars,
    lambda inner: st.one_of(
        inner.map(lambda item: {"type": "array", "items": item, "maxItems": 3}),
        st.dictionaries(names, inner, max_size=2).map(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "additionalProperties": False,
            }
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
        inner.map(lambda option: {"anyOf": [option, {"type": "null"}]}),
        inner.map(lambda option: {"oneOf": [option, {"type": "null"}]}),
    ),
    max_leaves=4,
)
DEFINITIONS = {"City": {"type": "string", "enum": ["Rome", "Bonn"]}, "Size": {"type": "integer"}}


@st.composite
def functions(draw: st.DrawFn) -> dict[str, Any]:
    """A function with a schema of its own."""
    properties = draw(st.dictionaries(names, values, max_size=4))
    required = draw(st.lists(st.sampled_from(list(properties)), unique=True)) if properties else []
    schema = {"type": "object", "properties": properties, "required": required}
    schema["$defs"] = DEFINITIONS
    name = draw(st.sampled_from(["f", "get_it", "a.b", "a-b", "import"]))
    return {"name": name, "parameters": schema}


# The others' forced calls are a JSON array: their arguments hold tokens.
HELD = [name for name in PARSERS if plugins.load_class(PACKAGE, name, ToolParser).syntaxes]


def tool(name: str, properties: dict[str, Any], *required: str, **keywords: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*required], **keywords}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def forced(name: str, *tools: dict[str, Any], parallel: bool = True) -> ExpectedOutput:
    """What a reply must be where one of the tools must be called."""
    parser = plugins.load_class(PACKAGE, name, ToolParser)
    use = ToolOptions(list(tools), forced=list(tools), parallel=parallel)
    return ModelFormat(Tokenizer.bytes(), parser, None).expect("", use)


HINTS = [b"\n</parameter>", b"</parameter>\n</function>\n</tool_call>", b'")]', b"null"]


def random_output(grammar: Grammar, seed: int, max_tokens: int) -> str | None:
    """One output, which tries what may end a text early; None if it was cut off."""
    matcher, draw, output, planned = grammar.matcher(), random.Random(seed), bytearray(), b""
    while not matcher.is_complete:
        if len(output) == max_tokens:
            return None
        mask = matcher.bitmask()
        if not planned and draw.random() < 0.2:
            planned = draw.choice(HINTS)
        token_id, planned = (planned[0], planned[1:]) if planned else (-1, b"")
        if not is_allowed(mask, token_id):
            token_id, planned = draw.choice([i for i in range(EOS + 1) if is_allowed(mask, i)]), b""
        matcher.accept(token_id)
        if token_id != EOS:
            output.append(token_id)
    return output.decode()


def is_allowed(mask: bytes, token_id: int) -> bool:
    return token_id >= 0 and bool(mask[token_id // 8] >> token_id % 8 & 1)


def check_outputs(
    reply: ExpectedOutput, tools: list[dict[str, Any]], seeds: range, max_tokens: int = 600
) -> int:
    """Random outputs are calls that validate; returns how many there were."""
    assert reply.structured_output is not None and reply.tool_parser is not None
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    try:
        grammar = compile_grammar(reply.structured_output.kind, reply.structured_output.value)
        outputs = [random_output(grammar, seed, max_tokens) for seed in seeds]
    except GrammarError:
        return 0  # the client gets a 400
    texts = [output for output in outputs if output is not None]
    for text in texts:
        calls, content = read(reply.tool_parser(tools), [text])
        assert calls and not content, text
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), schemas[name])
    return len(texts)


@pytest.mark.parametrize("name", PARSERS)
@settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(
    functions=st.lists(functions(), min_size=1, max_size=2, unique_by=lambda f: f["name"]),
    seed=st.integers(0, 999),
)
def test_whatever_the_grammar_lets_through_is_a_valid_call(name, functions, seed):
    tools = [{"type": "function", "function": function} for function in functions]
    check_outputs(forced(name, *tools), tools, range(seed, seed + 2))


CITY = {"type": "string"}
EXPRESSIBLE = {
    "nothing": tool("f", {}),
    "text": tool("f", {"city": CITY, "days": {"type": "integer"}}, "city"),
    "text of a length": tool(
        "f", {"city": {"type": "string", "minLength": 2, "maxLength": 9}}, "city"
    ),
    "choices": tool("f", {"city": {"enum": ["Rome", "Bonn"]}}, "city"),
    "pydantic": tool(
        "f",
        {
            "city": {"anyOf": [CITY, {"type": "null"}], "default": None, "title": "City"},
            "size": {"$ref": "#/$defs/Size"},
        },
        "size",
        title="F",
        additionalProperties=False,
        **{"$defs": {"Size": {"enum": ["S", "M"], "type": "string", "title": "Size"}}},
    ),
    "lists and objects": tool(
        "f",
        {
            "cities": {"type": "array", "items": CITY},
            "where": {"type": "object"},
            "on": {"type": "boolean"},
        },
        "on",
    ),
    "closing tags in JSON": tool(
        "f", {"a": {"enum": [["</parameter>"], ['"</parameter></function>']]}, "b": CITY}, "a"
    ),
}


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("used", EXPRESSIBLE.values(), ids=EXPRESSIBLE)
def test_common_schemas_are_held_to_in_the_models_own_format(name, used):
    reply = forced(name, used)
    assert reply.tool_parser is plugins.load_class(PACKAGE, name, ToolParser)
    assert check_outputs(reply, [used], range(3), max_tokens=2000) > 0


NAMELESS = [None, {}, {"type": "object"}, {"type": "object", "properties": {}, "required": []}]


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("parameters", NAMELESS, ids=json.dumps)
def test_a_tool_without_parameters_takes_an_empty_object_only(name, parameters):
    used = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    reply = forced(name, used, parallel=False)
    assert reply.structured_output is not None and reply.tool_parser is not None
    grammar = compile_grammar(reply.structured_output.kind, reply.structured_output.value)
    outputs = [random_output(grammar, seed, max_tokens=200) for seed in range(3)]
    for output in outputs:
        assert output is not None
        calls, _ = read(reply.tool_parser([used]), [output])
        assert [json.loads(arguments) for _, arguments in calls] == [{}]


def test_a_tool_may_be_open_to_any_argument():
    used = tool("f", {}, additionalProperties={"type": "integer"})
    assert check_outputs(forced("hermes", used), [used], range(8)) > 3
    assert "additionalProperties" not in json.dumps(parameters_of(tool("f", {}, "x")["function"]))


INEXPRESSIBLE = {
    "pattern": tool("f", {"city": {"type": "string", "pattern": "^a+$"}}, "city"),
    "keywords of the object": tool("f", {"city": CITY}, minProperties=1),
    "any names": tool("f", {}, additionalProperties={"type": "integer"}),
    "required by name alone": tool("f", {}, "city"),
    "the closing tag": tool("f", {"city": {"enum": ["</parameter>"]}}, "city"),
    "a tag in a name": tool("f", {"a>b": CITY}, "a>b"),
    "a text that is no null": tool(
        "f", {"city": {"enum": ["null", None], "type": ["string", "null"]}}, "city"
    ),
    "too large": tool("f", {f"p{i}": {"enum": ["x" * 99]} for i in range(600)}),
}


@pytest.mark.parametrize("used", INEXPRESSIBLE.values(), ids=INEXPRESSIBLE)
def test_arguments_that_plain_text_cannot_constrain_are_written_as_json(used):
    assert forced("qwen3_coder", used).tool_parser is ForcedCallsParser


@pytest.mark.parametrize("name", ["class", "a-b", "größe", "9"])
def test_values_that_are_not_python_are_written_as_json(name):
    assert forced("pythonic", tool("f", {name: CITY})).tool_parser is ForcedCallsParser
    if name != "class":
        assert forced("pythonic", tool(name, {})).tool_parser is ForcedCallsParser


def test_references_that_go_round_and_round_end():
    options = [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}]
    used = tool("f", {"a": {"anyOf": options}}, "a", **{"$defs": {"A": {"anyOf": options}}})
    for name in PARSERS:
        forced(name, used)
    for count in (2, 60):
        chain = {f"A{i}": {"anyOf": [{"$ref": f"#/$defs/A{i + 1}"}] * 2} for i in range(count)}
        chain |= {f"A{count}": CITY}
        forced("qwen3_coder", tool("f", {"a": {"$ref": "#/$defs/A0"}}, **{"$defs": chain}))


def test_special_tokens_are_written_as_tokens():
    parser = plugins.load_class(PACKAGE, "deepseek", ToolParser)
    ids = {marker: number for number, marker in enumerate(parser.markers)}
    tools = [EXPRESSIBLE["nothing"]]
    tokens = AddedTokens(ids)
    grammar = calls_grammar(parser.syntaxes, parser.arguments_grammar, tools, True, tokens)
    assert "｜" not in grammar and "\\uff5c" not in grammar
    assert all(f"<[{number}]>" in grammar for number in ids.values())


def test_added_tokens_are_written_as_tokens():
    """llguidance takes all added tokens in angle brackets, as Qwen has, for special ones."""
    folder = find_model("demo")
    tokenizer = Tokenizer.load(str(folder))
    vocabulary = load_vocabulary(Config(), read_spec(folder))
    used = tool("f", {"city": CITY}, "city")
    model_format = ModelFormat(tokenizer, plugins.load_class(PACKAGE, "hermes", ToolParser), None)
    reply = model_format.expect("", ToolOptions([used], forced=[used], parallel=False))
    assert reply.structured_output is not None
    matcher = Grammar(reply.structured_output, vocabulary).matcher()
    for token_id in tokenizer.encode(
        '<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call>'
    ):
        assert is_allowed(matcher.bitmask(), token_id), tokenizer.token_string(token_id)
        matcher.accept(token_id)
    assert matcher.is_complete


def test_many_references_into_a_large_schema_are_not_expressible():
    properties = {f"p{number}": {"$ref": "#/$defs/A"} for number in range(1000)}
    schema = {"type": "object", "properties": properties, "$defs": {"A": {"type": "string"}}}
    with pytest.raises(NotExpressible):
        properties_of({"name": "f", "parameters": schema})
