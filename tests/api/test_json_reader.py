"""JSON as models write it: what is repaired, and that no text is lost."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servd.api.output import json_reader
from servd.api.output.incremental import Reader
from servd.api.output.json_reader import JsonReader, arguments_object, missing_end

END = "</tool_call>"


def read(pieces) -> tuple[str, bool]:
    """What is emitted for a value in pieces, and whether it ended."""
    reader = Reader()
    emitted: list[str] = []
    steps = JsonReader(reader, emitted.append, (END,)).value()
    for piece in [*pieces, None]:
        if piece is None:
            reader.ended = True
        else:
            reader.push(piece)
        try:
            next(steps)
        except StopIteration as stop:
            return "".join(emitted), stop.value
    raise AssertionError("the reader waits for text after the end")


REPAIRED = {
    "raw line break": ('{"s": "a\nb"}', {"s": "a\nb"}),
    "raw tab and carriage return": ('{"s": "\ta\r\n"}', {"s": "\ta\r\n"}),
    "a control character in a key": ('{"a\x01": 1}', {"a\x01": 1}),
    "single quotes": ("{'s': 'a', 't': [ 'b' ]}", {"s": "a", "t": ["b"]}),
    "a double quote in single ones": ("""{'s': 'say "x"'}""", {"s": 'say "x"'}),
    "an apostrophe in single quotes": ("{'s': 'it's', 'n': 1}", {"s": "it's", "n": 1}),
    "an escaped apostrophe": (r"""{"s": "it\'s"}""", {"s": "it's"}),
    "a backslash that escapes nothing": (r'{"s": "\d+ \u12"}', {"s": r"\d+ \u12"}),
    "Python's words": (
        "{'a': True, 'b': None, 'c': [False]}",
        {"a": True, "b": None, "c": [False]},
    ),
    "a last comma": ('{"a": [1, 2, ], "b": {"c": 1,},\n}', {"a": [1, 2], "b": {"c": 1}}),
    "names without quotes": ('{city: "Rome", days: 3}', {"city": "Rome", "days": 3}),
    "a missing comma": ('{"a": 1 "b": [{} {}]}', {"a": 1, "b": [{}, {}]}),
    "missing brackets": ('{"a": [{"b": 1}' + END, {"a": [{"b": 1}]}),
    "quotes in a string": ('{"s": "say "hi" now", "t": 1}', {"s": 'say "hi" now', "t": 1}),
    "code in a string": ('{"s": "print({"a": "b"})"}' + END, {"s": 'print({"a": "b"})'}),
    "words": ('{"a": NaN, "b": 007, "c": Rome}', {"a": "NaN", "b": "007", "c": "Rome"}),
}


@pytest.mark.parametrize("title", REPAIRED)
def test_what_has_one_meaning_is_repaired_however_it_is_cut(title):
    text, value = REPAIRED[title]
    for i in range(len(text) + 1):
        written, is_whole = read([text[:i], text[i:]])
        assert is_whole and json.loads(written) == value
    assert read(text)[0] == written


RAW = {
    "text": ('{"a": 1, what do I know}', {"a": 1, "raw_arguments": "what do I know"}),
    "text for a value": ('{"a": Rome or Paris}', {"a": "Rome or Paris"}),
    "no value": ('{"a": , "b": 1}', {"a": ', "b": 1'}),
    "no colon": ('{"a"; 1}', {"a": "; 1"}),
    "another bracket": ('{"a": [1}, 2]', {"a": [1, "}, 2"]}),
    "a comment": ('{"a": 1 // one\n}', {"a": 1, "raw_arguments": "// one\n"}),
    "no key": ('{"a", "b"}' + END, {"a": ', "b"'}),
    "a string without end": ('{"a": "b" "c": 2}\n' + END, {"a": 'b" "c": 2}\n'}),
}


@pytest.mark.parametrize("title", RAW)
def test_other_text_becomes_a_string_in_its_place(title):
    text, value = RAW[title]
    for i in range(len(text) + 1):
        written, is_whole = read([text[:i], text[i:]])
        assert is_whole and json.loads(written) == value


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=30)
@given(st.lists(JSON) | st.dictionaries(st.text(), JSON), st.booleans(), st.data())
def test_valid_json_is_emitted_as_it_is(value, ascii_only, data):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=data.draw(st.sampled_from([None, 2])))
    cut = data.draw(st.integers(0, len(text)))
    assert read([text[:cut], text[cut:]]) == (text, True)
    written, is_whole = read([text[:cut]])
    assert is_whole == (cut == len(text)) and text.startswith(written)


MARKS = st.sampled_from([*"{}[]\"'\\,:\n<u0", END, "a b", '", "b": 1', "True", "\xa0", "\u2028"])


@pytest.mark.parametrize("max_repairs", [2, json_reader.MAX_REPAIRS])
@given(st.lists(MARKS, max_size=20).map("".join), st.data())
def test_any_text_becomes_the_beginning_of_an_object(max_repairs, text, data):
    text = "{" + text
    cut = data.draw(st.integers(0, len(text)))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(json_reader, "MAX_REPAIRS", max_repairs)
        written, is_whole = read(text)
        assert read([text[:cut], text[cut:]]) == read([text]) == (written, is_whole)
    if is_whole:
        assert isinstance(json.loads(written), dict)
    else:
        completed = json.loads(written + missing_end(written))
        assert completed["raw_arguments"] == written
        assert arguments_object(written) == {"raw_arguments": written}


def test_what_is_not_repaired_any_more_is_kept_as_text():
    words = "True, " * (2 * json_reader.MAX_REPAIRS)
    written, is_whole = read(["[", words, "1]"])
    assert is_whole
    *repaired, text = json.loads(written)
    assert repaired == [True] * (json_reader.MAX_REPAIRS + 1)
    assert "".join(["True, "] * len(repaired)) + text + "]" == words + "1]"


@pytest.mark.parametrize("text", ["{b", '{"a": 1, b', '{"a": {"c": 1, b ', "{a: 1, b"])
def test_a_name_that_breaks_off_leaves_the_beginning_of_an_object(text):
    written, is_whole = read([text])
    assert not is_whole
    assert json.loads(written + missing_end(written))["raw_arguments"] == written


@pytest.mark.parametrize("text", ["[1]", '"a"', "null", "", '{"a', "{" * 100_000])
def test_arguments_that_are_no_object_are_held_by_one(text):
    assert arguments_object(text) == {"raw_arguments": text}


def test_half_a_surrogate_pair_does_not_lose_the_arguments():
    assert arguments_object(r'{"a": "\ud83d"}') == {"a": "\ufffd"}
