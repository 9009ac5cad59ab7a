"""InternLM 2.5: `<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>`."""

from servd.api.output.call_grammar import CallSyntax
from servd.api.output.incremental import Steps
from servd.api.output.tool_parser import ToolParser

OPEN = "<|action_start|>"
PLUGIN = "<|plugin|>"
CLOSE = "<|action_end|>"


class InternLMToolParser(ToolParser):
    """A parser of plugin actions. Other actions, e.g. code for `<|interpreter|>`, are content."""

    markers = (OPEN, PLUGIN, CLOSE)
    syntaxes = (CallSyntax(f'{OPEN}{PLUGIN}\n{{"name": "NAME", "parameters": ARGUMENTS}}{CLOSE}'),)

    @classmethod
    def matches(cls, template: str) -> bool:
        return OPEN in template and PLUGIN in template

    def body(self) -> Steps[None]:
        yield from self.read_to_end(OPEN, call=self._call)

    def _call(self) -> Steps[bool]:
        yield from self.reader.space()
        if not (yield from self.reader.accept(PLUGIN)):
            return False
        return (yield from self.json_call_until(CLOSE))
