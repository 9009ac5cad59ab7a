"""Jamba and Hunyuan-A13B: `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>`."""

from servd.api.output.call_grammar import CallSyntax
from servd.api.output.tool_parsers import minimax
from servd.api.output.tool_parsers._marked_json import MarkedJsonParser
from servd.api.output.tool_parsers.minimax import CLOSE, OPEN


class Parser(MarkedJsonParser):
    """One array between tags; MiniMax M1 has lines between them."""

    markers = (OPEN, CLOSE)
    begins = (OPEN,)
    end = CLOSE
    syntaxes = (
        CallSyntax('{"name": "NAME", "arguments": ARGUMENTS}', f"{OPEN}[", ", ", f"]{CLOSE}"),
    )

    @classmethod
    def matches(cls, template: str) -> bool:
        """The tag, without an example of a line."""
        return OPEN in template and not minimax.Parser.matches(template)
