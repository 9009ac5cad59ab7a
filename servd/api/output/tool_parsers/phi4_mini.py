"""Phi-4-mini: `<|tool_call|>[{"name": ..., ...}]<|/tool_call|>` or `functools[...]`."""

from servd.api.output.call_grammar import CallSyntax
from servd.api.output.tool_parsers._marked_json import MarkedJsonParser

OPEN = "<|tool_call|>"
CLOSE = "<|/tool_call|>"
WORD = "functools["  # not the word alone, which is a module of Python
CALL = '{"name": "NAME", "arguments": ARGUMENTS}'


class Phi4MiniToolParser(MarkedJsonParser):
    """A parser of the tags of Phi-4-mini's template, and of `functools` of vLLM's template."""

    markers = (OPEN, CLOSE)
    begins = (OPEN, WORD)
    signs = ("<|/tool|>", WORD)
    end = CLOSE
    syntaxes = (CallSyntax(CALL, f"{OPEN}[", ", ", f"]{CLOSE}"), CallSyntax(CALL, WORD, ", ", "]"))
