"""Llama 3: `{"name": ..., "parameters": {...}}`, or several, joined by `;`, perhaps after a tag."""

from servd.api.output.call_grammar import CallSyntax
from servd.api.output.incremental import SPACE, Steps
from servd.api.output.tool_parser import ToolParser

TAG = "<|python_tag|>"


class Llama3JsonToolParser(ToolParser):
    """Requires parameters in a call: without a tag, any JSON answer begins like a call."""

    markers = (TAG,)
    syntaxes = (CallSyntax('{"name": "NAME", "parameters": ARGUMENTS}', separator="; "),)

    @classmethod
    def matches(cls, template: str) -> bool:
        """Return whether a template has TAG, or the example of a call of Llama 3.1 to 3.3."""
        example = '{"name": function name, "parameters":'
        return "[func_name1(" not in template and (TAG in template or example in template)

    def body(self) -> Steps[None]:
        yield from self.reader.space()
        if (yield from self.reader.peek()) == "{":
            yield from self.attempt(self._calls())
        else:
            self.content(self.reader.consumed)
        yield from self.read_to_end(TAG, call=self._calls)

    def _calls(self) -> Steps[bool]:
        while True:
            yield from self.reader.space()
            if not (yield from self.json_call(needs_arguments=True)):
                return False
            _, following = yield from self.reader.ahead(SPACE)
            if following == ";":
                yield from self.reader.accept_after_space(";")
            elif following != "{":
                return True
