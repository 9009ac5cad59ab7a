"""The contract of reasoning parsers, over all files of the package and their recorded replies."""

import importlib
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servd.api.output.incremental import Content, Reasoning
from servd.api.output.reasoning_parser import ReasoningParser
from servd.base import plugins
from tests.api.reasoning_parsers.recorded import Case

PACKAGE = "servd.api.output.reasoning_parsers"
PARSERS = plugins.names(PACKAGE)


def recorded(name: str) -> dict[str, Case]:
    return importlib.import_module(f"tests.api.reasoning_parsers.recorded.{name}").CASES


CASES = [
    pytest.param(name, case, id=f"{name}-{title}")
    for name in PARSERS
    for title, case in recorded(name).items()
]


def read(name: str, case: Case, pieces) -> tuple[str, str]:
    """Reasoning and content."""
    kind = plugins.load_class(PACKAGE, name, ReasoningParser)
    parser = kind(case.is_thinking or kind.always)
    reasoning, content = "", ""
    for delta in [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish():
        assert isinstance(delta, Reasoning | Content) and delta.text
        if isinstance(delta, Reasoning):
            assert not content, "reasoning comes first"
            reasoning += delta.text
        else:
            content += delta.text
    spans = [case.text[begin : None if end == inf else end] for begin, end in parser.spans]
    assert "\n\n".join(map(str.strip, spans)) == reasoning
    return reasoning, content


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_reply_cut_at_every_character(name, case):
    for i in range(max(1, len(case.text))):
        assert read(name, case, [case.text[:i], case.text[i:]]) == (case.reasoning, case.content)
    assert read(name, case, case.text) == (case.reasoning, case.content)


@pytest.mark.parametrize(("name", "case"), CASES)
@settings(max_examples=5)
@given(data=st.data())
def test_a_reply_in_random_pieces(name, case, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(case.text)))))
    pieces = [case.text[a:b] for a, b in zip([0, *cuts], [*cuts, len(case.text)], strict=True)]
    assert read(name, case, pieces) == (case.reasoning, case.content)


@pytest.mark.parametrize("name", PARSERS)
def test_reasoning_comes_as_it_is_written(name):
    parser = plugins.load_class(PACKAGE, name, ReasoningParser)(True)
    assert parser.feed("First") == [Reasoning("First")]
    assert parser.feed(", this") == [Reasoning(", this")]
    assert parser.feed(f".\n{parser.end_tag}") == [Reasoning(".")]
    assert parser.feed("\n\nSo") == [Content("So")]
    assert parser.feed(" it is") == [Content(" it is")]
