"""Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}]`. Granite 4 uses Hermes's format."""

from servd.api.output.call_grammar import CallSyntax
from servd.api.output.tool_parsers._marked_json import MarkedJsonParser

TAG = "<|tool_call|>"


class GraniteToolParser(MarkedJsonParser):
    """A parser of a JSON array after a tag."""

    markers = begins = (TAG,)
    syntaxes = (CallSyntax('{"name": "NAME", "arguments": ARGUMENTS}', f"{TAG}[", ", ", "]"),)
