"""What grammars of calls that nothing forces let through: any text, and in it valid calls only."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servd.api.output.incremental import ToolCallArguments, ToolCallStart
from servd.api.output.model_format import ModelFormat
from servd.api.output.output_parser import ExpectedOutput, OutputParser
from servd.api.output.tool_parser import ForcedCallsParser, ToolParser
from servd.api.text.prompt import TextGrammar, ToolOptions
from servd.api.text.tokenizer import Tokenizer
from servd.base import plugins
from servd.base.errors import InvalidRequest
from servd.checkpoint.hub import find_model
from servd.checkpoint.model_spec import read_spec
from servd.config import Config
from servd.core.structured_output.grammar import Grammar, GrammarError
from servd.core.structured_output.vocabulary import load_vocabulary
from servd.messages.params import StructuredOutput
from tests.api.tool_parsers.test_grammars import functions, is_allowed
from tests.api.tool_parsers.test_parsers import PACKAGE, PARSERS, read
from tests.core.structured_output.driver import EOS, compile_grammar

HOLDING = [name for name in PARSERS if plugins.load_class(PACKAGE, name, ToolParser).can_hold()]
PATCH = r"""start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: addition | removal | change
addition: "*** Add File: " path LF ("+" /(.*)/ LF)+ -> added
removal: "*** Delete File: " path LF
change: "*** Update File: " path LF move? lines?
move: "*** Move to: " path LF
lines: (context | line)+ ("*** End of File" LF)?
context: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
path: /(.+)/
%import common.LF
"""
# The same, as the regular expression of another library.
PATH = r"[^\n]+\n"
LINES = r"(?:(?:@@(?: [^\n]+)?|[-+ ][^\n]*)\n)+(?:\*\*\* End of File\n)?"
IS_PATCH = re.compile(
    r"\*\*\* Begin Patch\n"
    rf"(?:\*\*\* Add File: {PATH}(?:\+[^\n]*\n)+|\*\*\* Delete File: {PATH}"
    rf"|\*\*\* Update File: {PATH}(?:\*\*\* Move to: {PATH})?(?:{LINES})?)+"
    r"\*\*\* End Patch\n?"
)
TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def parser_class(name: str) -> type[ToolParser]:
    return plugins.load_class(PACKAGE, name, ToolParser)


def beginnings(parser: type[ToolParser]) -> list[str]:
    more = ["<|channel|>commentary to="] if "<|channel|>" in parser.openings() else []
    return [*more, *parser.openings()]


def strict(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function | {"strict": True}}


def expect(parser: type[ToolParser] | None, options: ToolOptions, **fields: Any) -> ExpectedOutput:
    fields["end_ids"] = frozenset({EOS})
    return ModelFormat(Tokenizer.bytes(), parser, None, **fields).expect("", options)


def outputs(expected: ExpectedOutput, seeds: range, hints: list[str], size: int = 700) -> list[str]:
    """Random outputs that begin with the first hint, and often write one; without those that were
    cut off.
    """
    assert expected.structured_output is not None
    grammar = compile_grammar("grammar", expected.structured_output.value)
    texts: list[str] = []
    for seed in seeds:
        matcher = grammar.matcher()
        draw = random.Random(seed)
        output = bytearray()
        planned = hints[0].encode()
        while not matcher.is_complete and len(output) < size:
            mask = matcher.bitmask()
            if not planned and draw.random() < 0.3:
                planned = draw.choice(hints).encode()
                if planned.startswith((b"<|start|>", b"<|channel|>")) and not is_allowed(mask, EOS):
                    planned = b""  # a token in real vocabularies, which no argument can contain
            token_id = planned[0] if planned else -1
            planned = planned[1:]
            if token_id < 0 and is_allowed(mask, EOS) and draw.random() < 0.1:
                token_id = EOS
            if not is_allowed(mask, token_id):
                allowed = [i for i in range(EOS + 1) if is_allowed(mask, i)]
                token_id = draw.choice(allowed)
                planned = b""
            matcher.accept(token_id)
            if token_id == EOS:
                texts.append(output.decode())
                break
            output.append(token_id)
        else:
            if matcher.is_complete:
                texts.append(output.decode())
    return texts  # all of them whole: a cut one could be anything


@pytest.mark.parametrize("name", HOLDING)
@settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(
    functions=st.lists(functions(), min_size=1, max_size=2, unique_by=lambda f: f["name"]),
    seed=st.integers(0, 999),
)
def test_calls_in_free_text_are_valid(name, functions, seed):
    tools = [strict(function) for function in functions]
    parser = parser_class(name)
    schemas = {function["name"]: function["parameters"] for function in functions}
    try:
        expected = expect(parser, ToolOptions(tools))
        hints = [*beginnings(parser), "</parameter>", "\n</tool_call>"]
        texts = outputs(expected, range(seed, seed + 3), hints)
    except (GrammarError, InvalidRequest):
        return  # the client gets a 400
    for text in texts:
        for called, arguments in read(parser(tools), [text])[0]:
            jsonschema.validate(json.loads(arguments), schemas[called])


@pytest.mark.parametrize("name", HOLDING)
def test_calls_begin_in_the_middle_of_a_text(name):
    """Not vacuous: the outputs have texts, and calls of a tool with and of one without `strict`."""
    held = {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer"}},
            "required": ["n"],
        },
    }
    free = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}
    parser = parser_class(name)
    tools = [strict(held), free]
    expected = expect(parser, ToolOptions(tools))
    hints = [*beginnings(parser), *parser.openings() * 2, "a < b"]
    calls: list[tuple[str, str]] = []
    contents = ""
    for text in outputs(expected, range(40), hints):
        calls_of_text, content = read(parser(tools), [text])
        calls += calls_of_text
        contents += content
    assert contents
    for called, arguments in calls:
        value = json.loads(arguments)
        assert type(value["n"]) is int if called == "f" else isinstance(value, dict)
    assert {called for called, _ in calls} == {"f", "g"}


def test_a_word_before_calls_may_stand_alone():
    function = {"name": "f", "parameters": {"type": "object", "required": ["n"]}}
    expected = expect(parser_class("phi4_mini"), ToolOptions([strict(function)]))
    assert allows(expected, "from functools import cache\n")
    assert allows(expected, 'functools[{"name": "f", "arguments": {"n": 1}}]')
    assert not allows(expected, 'functools[{"name": "f", "arguments": {}}]')


def test_who_is_held():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    hermes = parser_class("hermes")
    assert expect(hermes, ToolOptions(tools)).structured_output is None
    assert expect(hermes, ToolOptions(tools), enforced="strict").structured_output is not None
    held = [strict(tool["function"]) for tool in tools]
    assert expect(hermes, ToolOptions(held)).structured_output is not None
    assert expect(hermes, ToolOptions(held), enforced="off").structured_output is None
    for name in {*PARSERS} - {*HOLDING}:
        model_format = ModelFormat(Tokenizer.bytes(), parser_class(name), None)
        assert model_format.unheld_fields(ToolOptions(held)) == ["tools.strict"]
        assert model_format.expect("", ToolOptions(held)).structured_output is None
    assert len(HOLDING) >= 12
    schema = StructuredOutput("json", '{"type": "object"}')
    text = StructuredOutput("structural_tag", '{"format": {"type": "any_text"}}')
    for name, held_with_schema in (("hermes", True), ("llama3_json", True), ("gemma4", False)):
        model_format = ModelFormat(Tokenizer.bytes(), parser_class(name), None)
        fields = [] if held_with_schema else ["tools.strict"]
        assert model_format.unheld_fields(ToolOptions(held), schema) == fields
        assert model_format.unheld_fields(ToolOptions(held), text) == ["tools.strict"]


def test_a_strict_tool_whose_schema_the_format_cannot_hold_is_refused():
    function = {"name": "f", "parameters": {"type": "object", "minProperties": 1}}
    with pytest.raises(InvalidRequest, match="`f` cannot be enforced"):
        expect(parser_class("qwen3_coder"), ToolOptions([strict(function)]))
    plain = [{"type": "function", "function": function}]
    options = ToolOptions(plain)
    assert expect(parser_class("qwen3_coder"), options, enforced="strict").structured_output is None


def custom(grammar: TextGrammar | None, *, forced: bool) -> ToolOptions:
    tools = [{"type": "function", "function": {"name": "apply_patch", "parameters": TEXT}}]
    return ToolOptions(tools, tools if forced else [], custom={"apply_patch": grammar})


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("name", [*PARSERS, None])
def test_a_custom_tools_text_follows_its_grammar(name, forced):
    parser = None if name is None else parser_class(name)
    if not forced and name not in HOLDING:
        return
    options = custom(TextGrammar("lark", PATCH), forced=forced)
    expected = expect(parser, options)
    assert expected.tool_parser is not None
    begins = [] if forced else beginnings(expected.tool_parser)
    hints = [
        *begins,
        *begins,
        "*** End Patch",
        "</parameter>",
        '"',
        "\\",
        "\n",
        "\\n",
        "+a\n",
        "é{",
    ]
    num_calls = 0
    for text in outputs(expected, range(6), hints, size=3000):
        parsed = OutputParser(expected)
        deltas = parsed.feed(text) + parsed.finish()
        inputs = ["" for delta in deltas if isinstance(delta, ToolCallStart)]
        assert all(delta.is_custom for delta in deltas if isinstance(delta, ToolCallStart))
        for delta in deltas:
            if isinstance(delta, ToolCallArguments):
                inputs[delta.index] += delta.text
        num_calls += len(inputs)
        for patch in inputs:
            assert IS_PATCH.fullmatch(patch), (text, patch)
    assert num_calls


@pytest.mark.parametrize(
    ("pattern", "text", "wrong"),
    [
        (r"[a-z]+/\d+", "ab/12", "ab/"),
        (r'say "[^"]*"\n', 'say "a\\b\tc"\n', 'say "a"'),
        (r"(?s:.+)\x22", 'a\n\\""', "a"),
        (r"\S+\s\S+", 'a"\n\\', "a b c"),
        (r"(?:\\[nt])+|[[:word:]]", None, None),
    ],
)
def test_a_custom_tools_text_follows_a_regular_expression(pattern, text, wrong):
    options = custom(TextGrammar("regex", pattern), forced=True)
    if text is None:
        with pytest.raises(InvalidRequest, match="not supported"):
            expect(None, options)
        return
    expected = expect(None, options)
    assert expected.tool_parser is ForcedCallsParser
    assert allows(expected, call("apply_patch", text))
    assert not allows(expected, call("apply_patch", wrong))


def test_a_string_may_have_a_character_by_its_number_and_a_backslash_before_an_x():
    expected = expect(None, custom(TextGrammar("lark", r'start: "\x41\\x41"'), forced=True))
    assert allows(expected, call("apply_patch", r"A\x41"))


def test_a_recursive_grammar_holds_with_what_it_ignores():
    lark = 'start: sum\nsum: term ("+" term)*\nterm: /\\d+/ | "(" sum ")"\n%ignore " "\n'
    expected = expect(None, custom(TextGrammar("lark", lark), forced=True))
    assert allows(expected, call("apply_patch", "1 + ((2+3) + 4)"))
    assert not allows(expected, call("apply_patch", "1 + ((2+3"))


@pytest.mark.parametrize(
    "lark",
    [
        "",
        "begin: /a/",
        "start: %json {}",
        "start: A & B",
        "start: <tool>",
        'start: "a',
        "%import a.B",
    ],
)
def test_grammars_that_cannot_be_moved_are_refused(lark):
    with pytest.raises((InvalidRequest, GrammarError)):
        expected = expect(None, custom(TextGrammar("lark", lark), forced=True))
        allows(expected, "")


def call(name: str, text: str) -> str:
    arguments = json.dumps({"input": text}, ensure_ascii=False)
    return f'[{{"name": "{name}", "arguments": {arguments}}}]'


def allows(expected: ExpectedOutput, text: str) -> bool:
    assert expected.structured_output is not None
    matcher = compile_grammar("grammar", expected.structured_output.value).matcher()
    for byte in text.encode():
        if not is_allowed(matcher.bitmask(), byte):
            return False
        matcher.accept(byte)
    return matcher.is_complete or is_allowed(matcher.bitmask(), EOS)


def test_markers_that_are_tokens_begin_calls_and_spelled_ones_do_not_occur():
    folder = find_model("demo")
    tokenizer = Tokenizer.load(str(folder))
    spec = read_spec(folder)
    model_format = ModelFormat(
        tokenizer, parser_class("hermes"), None, end_ids=frozenset(spec.eos_token_ids)
    )
    function = {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}
    expected = model_format.expect("", ToolOptions([strict(function)]))
    assert expected.structured_output is not None
    grammar = Grammar(expected.structured_output, load_vocabulary(Config(), spec))
    opening = tokenizer.token_id("<tool_call>")
    text = 'Let me see, a < b.<tool_call>\n{"name": "f", "arguments": {"n": 3}}\n</tool_call>Done <'
    matcher = grammar.matcher()
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        assert is_allowed(matcher.bitmask(), token_id), tokenizer.token_string(token_id)
        matcher.accept(token_id)
    assert opening in tokenizer.encode(text)
    assert is_allowed(matcher.bitmask(), spec.eos_token_ids[0])
    for part in ("tool", "_", "call"):
        for token_id in tokenizer.encode(part, add_special_tokens=False):
            matcher.accept(token_id)
    assert not is_allowed(matcher.bitmask(), tokenizer.encode(">", add_special_tokens=False)[0])


def test_added_tokens_without_a_row_in_the_model_are_no_part_of_a_grammar():
    tokenizer = Tokenizer.load(str(find_model("demo")))
    highest = max(tokenizer.added_ids)
    model_format = ModelFormat(tokenizer, parser_class("hermes"), None, vocab_size=highest)
    function = {"name": "f", "parameters": {"type": "object"}}
    expected = model_format.expect("", ToolOptions([strict(function)]))
    assert highest not in model_format.tokens.ids.values()
    assert expected.structured_output is not None
    ranges = re.findall(r"<\[([\d,-]+)\]>", expected.structured_output.value)
    assert max(int(number) for text in ranges for number in re.findall(r"\d+", text)) < highest
