"""Gemma 4: FunctionGemma's notation with other tokens."""

from tests.api.tool_parsers.recorded import Case
from tests.api.tool_parsers.recorded.functiongemma import BEGIN, END, QUOTE
from tests.api.tool_parsers.recorded.functiongemma import CASES as OTHERS


def translated(text: str) -> str:
    return text.replace(BEGIN, "<|tool_call>").replace(END, "<tool_call|>").replace(QUOTE, '<|"|>')


CASES = {
    title: Case(translated(case.text), case.calls, translated(case.content))
    for title, case in OTHERS.items()
}
