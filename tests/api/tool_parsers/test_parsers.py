"""The contract of tool parsers, over all files of the package and their recorded replies."""

import importlib
import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from servd.api.output.incremental import Content, Reasoning, ToolCallArguments, ToolCallStart
from servd.api.output.json_reader import missing_end
from servd.api.output.tool_parser import ForcedCallsParser, ToolParser
from servd.base import plugins
from tests.api.tool_parsers.recorded import TOOLS, Case
from tests.proportion import assert_in_proportion, seconds

PACKAGE = "servd.api.output.tool_parsers"
PARSERS = plugins.names(PACKAGE)


def recorded(name: str) -> dict[str, Case]:
    return importlib.import_module(f"tests.api.tool_parsers.recorded.{name}").CASES


CASES = [
    pytest.param(name, case, id=f"{name}-{title}")
    for name in PARSERS
    for title, case in recorded(name).items()
]


def read(parser, pieces) -> tuple[list[tuple[str, str]], str]:
    """Calls and content of a reply in pieces, after checks of every stream of deltas."""
    calls: list[list[str]] = []
    ids = set()
    content = ""
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    for delta in deltas:
        match delta:
            case Content(text=text):
                content += text
            case ToolCallStart(index=index, id=call_id, name=name):
                assert index == len(calls) and name
                calls.append([name, ""])
                ids.add(call_id)
            case ToolCallArguments(index=index, text=text):
                assert index == len(calls) - 1 and text
                calls[index][1] += text
            case Reasoning():
                raise AssertionError("a tool parser knows no reasoning")
    assert len(ids) == len(calls) == parser.num_calls
    return [(name, arguments) for name, arguments in calls], content


def make(name: str):
    return plugins.load_class(PACKAGE, name, ToolParser)(TOOLS)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_reply_cut_at_every_character(name, case):
    for i in range(max(1, len(case.text))):
        assert read(make(name), [case.text[:i], case.text[i:]]) == (case.calls, case.content)
    assert read(make(name), case.text) == (case.calls, case.content)


@pytest.mark.parametrize("name", PARSERS)
def test_any_text_is_read_the_same_in_any_pieces(name):
    texts = [case.text.replace(">", "> ") for case in recorded(name).values()]
    parts = sorted({part for text in texts for part in text.split(" ")})

    @settings(max_examples=30)
    @given(st.lists(st.sampled_from(parts) | st.text(max_size=3), max_size=12))
    @example(["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"])  # calls, and none of them
    def check(pieces: list[str]):
        text = "".join(pieces)
        whole = read(make(name), [text])
        assert read(make(name), pieces) == read(make(name), text) == whole
        if not whole[0]:
            assert whole[1] == text  # nothing is lost

    check()


GEMMA = st.sampled_from([*"{}[]:,\"'<b1 ", "a:", '<|"|>', "<tool_call|>", "{a:[1,2", ',"b":'])


@given(st.lists(GEMMA, max_size=20).map("".join))
def test_any_arguments_of_gemma_become_the_beginning_of_an_object(text):
    calls, _ = read(make("gemma4"), [f"<|tool_call>call:f{{{text}"])
    ((_, arguments),) = calls
    assert isinstance(json.loads(arguments + missing_end(arguments)), dict)


@pytest.mark.parametrize("name", sorted({*PARSERS} - {"lfm2", "pythonic"}))
def test_arguments_come_while_they_are_written(name):
    """A long string is not held back; but Python is only known to be Python at its end."""
    cases = [case for case in recorded(name).values() if case.calls]
    case = next((case for case in cases if "city" in case.calls[0][1]), None)
    assert case is not None, "record a call with an argument `city`"
    city = json.loads(case.calls[0][1])["city"]
    parser = make(name)
    parser.feed(case.text.partition(city)[0])
    deltas = [parser.feed("word ") for _ in range(100)]
    assert deltas == [[ToolCallArguments(0, "word ")]] * 100


@pytest.mark.parametrize("name", PARSERS)
def test_text_is_not_held_back(name):
    parser = make(name)
    assert parser.feed("Hello") == [Content("Hello")]
    assert parser.feed(", you") == [Content(", you")]


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_no_text_takes_long(name, size):
    """Each would take seconds if what was read were read again."""
    case = next(iter(recorded(name).values()))
    begin = case.text.split("get_weather")[0]
    python = begin + "get_weather(a="
    floods = [begin * 70, begin + "{" * 2_000, begin + '{"a": "' + "\\" * 2_000]
    floods += [begin + " \n" * 1_000, "<[" * 1_000, "\xa0 " * 3_000, case.text * 20]
    floods += [python + "[" * 2_000, python + "-" * 2_000]
    for text in floods:
        parser = make(name)
        begun = time.process_time()
        for i in range(0, len(text), size):
            parser.feed(text[i : i + size])
        parser.finish()
        assert time.process_time() - begun < 0.5


FORCED = '[{"name": "get_weather", "arguments": {"city": "x"}}, {"name": "now", "arguments": {}}]'


def test_forced_calls():
    expected = ([("get_weather", '{"city": "x"}'), ("now", "{}")], "")
    for pieces in ([FORCED], FORCED, ["\n", FORCED]):
        assert read(ForcedCallsParser(TOOLS), pieces) == expected
    assert read(ForcedCallsParser(TOOLS), [FORCED[:20]]) == ([], FORCED[:20])
    cut = FORCED.index('"x"')
    assert read(ForcedCallsParser(TOOLS), [FORCED[:cut]]) == ([("get_weather", '{"city": ')], "")


BEGINS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": ',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": ',
    "llama3_json": '{"name": "f", "parameters": {"a": ',
    "gemma4": "<|tool_call>call:f{a:",
    "functiongemma": "<start_function_call>call:f{a:",
}
VALID = {
    "numbers": ("[", "1,"),
    "objects": ("[", '{"a": "x", "b": []}, '),
    "members": ("{", '"a": "x\\n", '),
}
OTHERS = {
    "words of Python": ("[", "True, "),
    "no commas": ("[", "{} "),
    "nested": ("", "[1, "),
    "marks in a string": ("", '"x" y '),
}


@pytest.mark.parametrize(
    ("name", "begin", "member"),
    [("hermes", *members) for members in (VALID | OTHERS).values()]
    + [(name, "[", "1,") for name in BEGINS],
)
def test_many_members_take_time_in_proportion(name, begin, member):
    def parse(size: int) -> None:
        deltas = make(name).feed(BEGINS[name] + begin + member * size)
        assert [type(delta) for delta in deltas[:2]] == [ToolCallStart, ToolCallArguments]

    assert_in_proportion(parse)


@pytest.mark.parametrize("title", VALID)
@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3_json"])
def test_valid_json_is_read_at_once(name, title):
    """64 kB take about 10 ms on an idle machine, and took 400 ms member by member."""
    begin, member = VALID[title]
    text = BEGINS[name] + begin + member * (64_000 // len(member))
    assert min(seconds(make(name).feed, text) for _ in range(3)) < 0.08


@pytest.mark.parametrize("title", sorted(OTHERS.keys() - {"nested"}))
def test_mistakes_are_read_at_once(title):
    """640 kB took 1 to 4 s while each mistake was repaired."""
    begin, member = OTHERS[title]
    text = BEGINS["hermes"] + begin + member * (320_000 // len(member))
    assert min(seconds(make("hermes").feed, text) for _ in range(3)) < 0.8


def test_text_that_may_be_a_key_takes_time_in_proportion():
    def parse(size: int) -> None:
        parser = make("hermes")
        parser.feed(BEGINS["hermes"] + '"x" y", "')
        for _ in range(size):
            parser.feed("ab ")

    assert_in_proportion(parse)
