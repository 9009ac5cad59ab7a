"""Jamba and Hunyuan-A13B: `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>`."""

from servd.api.output.call_grammar import CallSyntax
from servd.api.output.tool_parsers import minimax
from servd.api.output.tool_parsers._marked_json import MarkedJsonParser
from servd.api.output.tool_parsers.minimax import CLOSE, OPEN


class JambaToolParser(MarkedJsonParser):
    """A parser of one JSON array between tags."""

    markers = (OPEN, CLOSE)
    begins = (OPEN,)
    end = CLOSE
    syntaxes = (
        CallSyntax('{"name": "NAME", "arguments": ARGUMENTS}', f"{OPEN}[", ", ", f"]{CLOSE}"),
    )

    @classmethod
    def matches(cls, template: str) -> bool:
        """Return whether a template has the tag, but not MiniMax M1's format."""
        return OPEN in template and not minimax.MiniMaxToolParser.matches(template)
