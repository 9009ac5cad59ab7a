"""LFM2: `<|tool_call_start|>[f(a=1), g(b="x")]<|tool_call_end|>`, or JSON between the tokens."""

from servd.api.output.call_grammar import CallSyntax
from servd.api.output.incremental import Steps
from servd.api.output.tool_parsers.pythonic import PythonicToolParser

START = "<|tool_call_start|>"
END = "<|tool_call_end|>"


class Lfm2ToolParser(PythonicToolParser):
    """A parser of calls in Python between tokens. A system prompt may ask for JSON instead."""

    markers = (START, END)
    signs = (START, "<|tool_list_start|>", "List of tools: [")
    syntaxes = (CallSyntax("NAME(ARGUMENTS)", f"{START}[", ", ", f"]{END}"),)

    def body(self) -> Steps[None]:
        yield from self.read_to_end(START, call=self._calls)

    def _calls(self) -> Steps[bool]:
        reader = self.reader
        yield from reader.space()
        if (yield from reader.is_at(("{",))):
            is_call = yield from self.json_call()
        elif (yield from reader.is_at(("[{",))):
            is_call = yield from self.json_calls()
        else:
            return (yield from super()._calls())
        if is_call:
            yield from reader.accept_after_space(END)
        return is_call
