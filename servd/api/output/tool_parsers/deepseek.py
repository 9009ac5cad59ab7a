"""DeepSeek V3, R1 and V3.1: calls between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`."""

from servd.api.output.call_grammar import CallSyntax
from servd.api.output.incremental import Steps
from servd.api.output.tool_parsers._marked_calls import MarkedCallsParser

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"
CALL = f"{CALL_BEGIN}NAME{SEPARATOR}ARGUMENTS{CALL_END}"
FENCED_CALL = f"{CALL_BEGIN}function{SEPARATOR}NAME\n{FENCE}json\nARGUMENTS\n{FENCE}{CALL_END}"


class DeepSeekToolParser(MarkedCallsParser):
    """A parser of two formats. V3 and R1 write `function`, a separator, the name and fenced JSON.
    V3.1 writes the name, a separator and JSON.
    """

    markers = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
    signs = (CALL_BEGIN,)
    syntaxes = (
        CallSyntax(CALL, CALLS_BEGIN, "", CALLS_END),
        CallSyntax(FENCED_CALL, CALLS_BEGIN, "\n", CALLS_END),
    )

    def call(self) -> Steps[bool]:
        reader = self.reader
        name = yield from reader.until(SEPARATOR)
        yield from reader.space()
        is_fenced = (yield from reader.peek()) != "{"
        if is_fenced:
            name = yield from reader.until(f"{FENCE}json")
            yield from reader.space()
        name = name and name.strip()
        if not name or (yield from reader.peek()) != "{":
            return False
        self.begin_call(name)
        if not (yield from self.json_arguments()):
            return False
        yield from reader.space()
        if is_fenced and not (yield from reader.accept(FENCE)):
            return False
        yield from reader.space()
        return (yield from reader.accept(CALL_END))
