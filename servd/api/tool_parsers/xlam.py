"""xLAM: `<xlam>{"name": ..., "arguments": {...}}</xlam>`."""

from __future__ import annotations

from servd.api.incremental import Steps
from servd.api.tool_parser import ToolParser
from servd.api.tool_parsers._grammar import CallSyntax


class Parser(ToolParser):
    """One JSON object per pair of tags."""

    markers = ("<xlam>", "</xlam>")
    syntaxes = (CallSyntax('<xlam>{"name": "NAME", "arguments": ARGUMENTS}</xlam>'),)

    @classmethod
    def matches(cls, template: str) -> bool:
        """The tags."""
        return "<xlam>" in template

    def body(self) -> Steps[None]:
        """Read the whole output."""
        yield from self.rest("<xlam>", call=self._xlam)

    def _xlam(self) -> Steps[bool]:
        yield from self.reader.space()
        if not (yield from self.json_call()):
            return False
        yield from self.reader.space()
        return (yield from self.reader.accept("</xlam>"))
