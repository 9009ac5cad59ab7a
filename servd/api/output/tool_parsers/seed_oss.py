"""Seed-OSS: `<seed:tool_call><function=F><parameter=P>value</parameter></function>...`."""

from servd.api.output.call_grammar import CallSyntax
from servd.api.output.tool_parsers._parameters import ParametersParser

OPEN = "<seed:tool_call>"
CLOSE = "</seed:tool_call>"


class SeedOssToolParser(ParametersParser):
    """A parser of Qwen3-Coder's format without line breaks around values."""

    markers = (OPEN, CLOSE)
    syntaxes = (CallSyntax(f"{OPEN}\n<function=NAME>\nARGUMENTS</function>\n{CLOSE}"),)
