"""Structural tags: which texts their grammars let through, in both forms that servers read."""

import json
from typing import Any

import pytest

from servd.api.output.call_grammar import AddedTokens
from servd.api.output.structural_tag import structural_tag_grammar
from servd.base.errors import InvalidRequest
from servd.core.structured_output.grammar import GrammarError
from servd.messages.params import StructuredOutput
from tests.api.tool_parsers.test_grammars import is_allowed
from tests.core.structured_output.driver import EOS, compile_grammar

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TAG = {
    "type": "tag",
    "begin": "<f=a>",
    "content": {"type": "json_schema", "json_schema": NUMBER},
    "end": "</f>",
}
OLD = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": NUMBER, "end": "</f>"}],
    "triggers": ["<f="],
}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [TAG]}
TEXT = {"type": "any_text"}
CALL = '<f=a>{"n": 1}</f>'


def new(form: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


def grammar_of(tag: Any, tokens: AddedTokens | None = None) -> str:
    output = StructuredOutput("structural_tag", json.dumps(tag), param="response_format")
    return structural_tag_grammar(output, tokens or AddedTokens())


def allows(tag: Any, text: str) -> bool:
    matcher = compile_grammar("grammar", grammar_of(tag)).matcher()
    for byte in text.encode():
        if not is_allowed(matcher.bitmask(), byte):
            return False
        matcher.accept(byte)
    return matcher.is_complete or is_allowed(matcher.bitmask(), EOS)


@pytest.mark.parametrize(
    ("tag", "texts", "wrong"),
    [
        (
            OLD,
            ["", "a < b", f"x {CALL} y{CALL}", "<f"],
            ["<f=b>", '<f=a>{"n": "1"}</f>', CALL[:-1]],
        ),
        (new(TRIGGERED), ["", f"x {CALL} y"], ["<f=b>", CALL[:-1]]),
        (new({**TRIGGERED, "at_least_one": True}), [f"{CALL}{CALL} z"], ["", "x"]),
        (new({**TRIGGERED, "stop_after_first": True}), ["x", CALL], [f"{CALL}x", CALL * 2]),
        (new(TAG), [CALL], ["", f"{CALL}x"]),
        (
            new({"type": "tag", "begin": "<think>", "content": TEXT, "end": ["</think>", "."]}),
            ["<think>a < b</think>", "<think>so."],
            ["<think>", "a"],
        ),
        (
            new({"type": "sequence", "elements": [{"type": "const_string", "value": "A: "}, TAG]}),
            [f"A: {CALL}"],
            [CALL],
        ),
        (
            new({"type": "or", "elements": [{"type": "regex", "pattern": "[0-9]+/2"}, TAG]}),
            [CALL, "41/2"],
            ["4", f"4/2{CALL}"],
        ),
        (new({"type": "grammar", "grammar": 'start: "a" b\nb: "c" | "d"'}), ["ac", "ad"], ["a"]),
        (new({"type": "sequence", "elements": [TAG, TEXT]}), [f"{CALL} and\nmore"], ["and"]),
    ],
)
def test_texts_of_structural_tags(tag: Any, texts: list[str], wrong: list[str]):
    assert [text for text in texts if not allows(tag, text)] == []
    assert [text for text in wrong if allows(tag, text)] == []


def test_a_text_ends_before_a_token():
    tokens = AddedTokens({"<f=a>": 7, "</f>": 8})
    for form in ({"type": "sequence", "elements": [TEXT, TAG]}, {**TAG, "content": TRIGGERED}):
        assert "<[7]>" in grammar_of(new(form), tokens)


def test_the_shorter_of_two_triggers_begins_both_tags():
    other = {**TAG, "begin": "<f=abc>", "content": {"type": "const_string", "value": "x"}}
    form = {"type": "triggered_tags", "triggers": ["<f=abc", "<f="], "tags": [TAG, other]}
    assert allows(new(form), f"a {CALL} b <f=abc>x</f>")


def test_added_tokens_are_written_as_tokens():
    tokens = AddedTokens({"<f=": 7, "</f>": 8, "<eos>": 9}, frozenset({9}))
    grammar = grammar_of(OLD, tokens)
    assert "<[7]>" in grammar and "<[8]>" in grammar and "9" not in grammar


@pytest.mark.parametrize(
    "tag",
    [
        {"type": "structural_tag"},
        new(None),
        new({"type": "x"}),
        new([]),
        new({"type": "tag", "begin": 5, "content": TEXT, "end": ""}),
        new({"type": "or", "elements": []}),
        new({**TRIGGERED, "tags": []}),
        new({**TRIGGERED, "triggers": ["<g="]}),
        new({**TRIGGERED, "triggers": [5]}),
        new({"type": "sequence", "elements": [TRIGGERED, TRIGGERED]}),
        new({"type": "sequence", "elements": [TEXT, TAG]}),
        new({"type": "sequence", "elements": [TRIGGERED, {"type": "const_string", "value": "a"}]}),
        new({"type": "sequence", "elements": [{**TAG, "content": TEXT, "end": ""}, TAG]}),
        new({**TAG, "content": TRIGGERED}),
        {"type": "structural_tag", "structures": [5], "triggers": ["<"]},
        "x",
    ],
)
def test_tags_that_are_none_are_refused(tag: Any):
    with pytest.raises(InvalidRequest, match="structural tag is not valid"):
        grammar_of(tag)


def test_formats_in_formats_are_bounded():
    form: Any = TEXT
    for _ in range(50):
        form = {"type": "or", "elements": [form]}
    with pytest.raises(InvalidRequest, match="more than 16"):
        grammar_of(new(form))
    many = {"type": "or", "elements": [{"type": "or", "elements": [TAG] * 30}] * 30}
    with pytest.raises((InvalidRequest, GrammarError)):
        compile_grammar("grammar", grammar_of(new({"type": "or", "elements": [many] * 30})))


def test_a_tag_that_repeats_its_parts_too_often_is_refused():
    form: Any = TEXT
    for _ in range(16):
        form = {"type": "tag", "begin": "a", "content": form, "end": ["b", "c", "d"]}
    text = {"type": "const_string", "value": "x" * 1000}
    wide = {"type": "tag", "begin": "a", "content": text, "end": ["b"] * 1000}
    triggers = [*(f"t{i}" for i in range(10_000)), "<f="]
    many = {**TRIGGERED, "triggers": triggers, "tags": [TAG] * 10_000}
    for bomb in (form, wide, many):
        with pytest.raises(InvalidRequest, match="65536"):
            grammar_of(new(bomb))
