"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` or `[TOOL_CALLS]name[ARGS]{...}`."""

import random
import re
import string

from servd.api.output.call_grammar import CallSyntax
from servd.api.output.incremental import Steps
from servd.api.output.tool_parser import ToolParser

TAG = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"

_NAME = re.compile(r"[\w.-]*")


class MistralToolParser(ToolParser):
    """A parser of an array of calls after one tag, or of one call per tag."""

    markers = (TAG, CALL_ID, ARGS)
    syntaxes = (
        CallSyntax(
            '{"name": "NAME", "arguments": ARGUMENTS}',
            begin="[TOOL_CALLS][",
            separator=", ",
            end="]",
        ),
    )

    def new_id(self) -> str:
        """Return nine random letters and digits: Mistral's templates reject other ids."""
        return "".join(random.choices(string.ascii_letters + string.digits, k=9))

    def body(self) -> Steps[None]:
        yield from self.read_to_end(TAG, call=self._calls)

    def _calls(self) -> Steps[bool]:
        yield from self.reader.space()
        if (yield from self.reader.peek()) == "[":
            return (yield from self.json_calls())
        name = yield from self.reader.run(_NAME)
        if (yield from self.reader.accept(CALL_ID)):
            yield from self.reader.run(_NAME)
        yield from self.reader.accept(ARGS)
        yield from self.reader.space()
        if not name or (yield from self.reader.peek()) != "{":
            return False
        self.begin_call(name)
        return (yield from self.json_arguments())
