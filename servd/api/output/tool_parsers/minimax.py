"""MiniMax M1: a line of `{"name": ..., "arguments": {...}}` for each call, between tags."""

from servd.api.output.call_grammar import CallSyntax
from servd.api.output.incremental import Steps
from servd.api.output.tool_parser import ToolParser

OPEN = "<tool_calls>"
CLOSE = "</tool_calls>"
LINE = f'{OPEN}\n{{"name":'  # the example with which its template teaches the format


class MiniMaxToolParser(ToolParser):
    """A parser of JSON objects, one per line, without commas."""

    markers = (OPEN, CLOSE)
    syntaxes = (
        CallSyntax('{"name": "NAME", "arguments": ARGUMENTS}', f"{OPEN}\n", "\n", f"\n{CLOSE}"),
    )

    @classmethod
    def matches(cls, template: str) -> bool:
        """Return whether a template contains LINE, even with escaped line breaks."""
        return LINE in template.replace("\\n", "\n")

    def body(self) -> Steps[None]:
        yield from self.read_to_end(OPEN, call=self._calls)

    def _calls(self) -> Steps[bool]:
        return (yield from self.calls_until(CLOSE, "", self.json_call))
