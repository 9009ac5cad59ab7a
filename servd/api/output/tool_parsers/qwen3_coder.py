"""Qwen3-Coder: `<tool_call><function=F><parameter=P>value</parameter></function></tool_call>`."""

from servd.api.output.call_grammar import CallSyntax
from servd.api.output.tool_parsers._parameters import ParametersParser

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class Parser(ParametersParser):
    """Values are lines of their own."""

    markers = (OPEN, CLOSE)
    syntaxes = (CallSyntax(f"{OPEN}\n<function=NAME>\nARGUMENTS</function>\n{CLOSE}"),)
    line = "\n"

    @classmethod
    def matches(cls, template: str) -> bool:
        """The function tag; Seed-OSS has others around it."""
        return "<function=" in template and "<seed:" not in template
