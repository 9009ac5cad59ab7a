"""MiniMax M2: `<minimax:tool_call><invoke name="F"><parameter name="P">value</parameter>...`."""

from servd.api.output.call_grammar import CallSyntax
from servd.api.output.tool_parsers._parameters import ParametersParser

OPEN = "<minimax:tool_call>"
CLOSE = "</minimax:tool_call>"


class MiniMaxM2ToolParser(ParametersParser):
    """A parser of one or more calls between one pair of tags."""

    markers = (OPEN, CLOSE)
    syntaxes = (
        CallSyntax('<invoke name="NAME">\nARGUMENTS</invoke>', f"{OPEN}\n", "\n", f"\n{CLOSE}"),
    )
    function = ('<invoke name="', '">')
    function_end = "</invoke>"
    parameter = ('<parameter name="', '">')
