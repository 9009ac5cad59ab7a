"""Kimi K2: `<|tool_call_begin|>functions.F:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`."""

import re
from dataclasses import dataclass, field

from servd.api.output.call_grammar import CallSyntax
from servd.api.output.incremental import Steps
from servd.api.output.tool_parsers._marked_calls import MarkedCallsParser

CALLS_BEGIN = "<|tool_calls_section_begin|>"
CALLS_END = "<|tool_calls_section_end|>"
CALL_BEGIN = "<|tool_call_begin|>"
CALL_END = "<|tool_call_end|>"
ARGUMENTS_BEGIN = "<|tool_call_argument_begin|>"
CALL = f"{CALL_BEGIN}functions.NAME:0{ARGUMENTS_BEGIN}ARGUMENTS{CALL_END}"

_HEAD = re.compile(r"(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?")


@dataclass(eq=False)
class KimiK2ToolParser(MarkedCallsParser):
    """A parser that uses the text before the arguments as call id, as the model expects."""

    markers = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, ARGUMENTS_BEGIN)
    signs = (ARGUMENTS_BEGIN, CALLS_BEGIN)
    syntaxes = (CallSyntax(CALL, CALLS_BEGIN, "", CALLS_END),)

    head: str = field(default="", init=False)
    ids: set[str] = field(default_factory=set[str], init=False)

    def new_id(self) -> str:
        """Return the written id, or a new id if another call has it: grammars cannot count."""
        if ":" not in self.head or self.head in self.ids:
            return super().new_id()
        self.ids.add(self.head)
        return self.head

    def call(self) -> Steps[bool]:
        reader = self.reader
        self.head = ((yield from reader.until(ARGUMENTS_BEGIN)) or "").strip()
        name = _HEAD.fullmatch(self.head)
        yield from reader.space()
        if not name or (yield from reader.peek()) != "{":
            return False
        self.begin_call(name["name"])
        if not (yield from self.json_arguments()):
            return False
        yield from reader.space()
        return (yield from reader.accept(CALL_END))
