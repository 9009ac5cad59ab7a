"""Qwen3-Coder: `<tool_call><function=F><parameter=P>value</parameter></function></tool_call>`."""

from servd.api.output.call_grammar import CallSyntax
from servd.api.output.tool_parsers._parameters import ParametersParser

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class Qwen3CoderToolParser(ParametersParser):
    """A parser of values that are on lines of their own."""

    markers = (OPEN, CLOSE)
    syntaxes = (CallSyntax(f"{OPEN}\n<function=NAME>\nARGUMENTS</function>\n{CLOSE}"),)
    line = "\n"

    @classmethod
    def matches(cls, template: str) -> bool:
        """Return whether a template has the function tag, but not Seed-OSS's tags around it."""
        return "<function=" in template and "<seed:" not in template
