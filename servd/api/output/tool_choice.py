"""ForcedCallsParser: parses forced calls of a model without a known format: a JSON array."""

from servd.api.output.call_grammar import CallSyntax
from servd.api.output.incremental import Steps
from servd.api.output.tool_parser import ToolParser


class ForcedCallsParser(ToolParser):
    syntaxes = (CallSyntax('{"name": "NAME", "arguments": ARGUMENTS}', "[", ", ", "]"),)

    def body(self) -> Steps[None]:
        yield from self.reader.space()
        yield from self.attempt(self.json_calls())
        yield from self.read_to_end()
