"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from servd.api.output.call_grammar import CallSyntax
from servd.api.output.incremental import Steps
from servd.api.output.tool_parser import ToolParser

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesToolParser(ToolParser):
    """A parser of one JSON object per pair of tags."""

    markers = (OPEN, CLOSE)
    syntaxes = (CallSyntax('<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>'),)

    @classmethod
    def matches(cls, template: str) -> bool:
        """Return whether a template has the tags, without another format between them."""
        other_markers = ("<function=", "<arg_key>", "<tool_sep>")
        is_another = any(other in template for other in other_markers)
        return OPEN in template and "arguments" in template and not is_another

    def body(self) -> Steps[None]:
        yield from self.read_to_end(OPEN, call=self._call)

    def _call(self) -> Steps[bool]:
        return (yield from self.json_call_until(CLOSE))
