"""GPT-OSS: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`."""

from servd.api.output.call_grammar import CallSyntax
from servd.api.output.incremental import Steps
from servd.api.output.tool_parser import ToolParser
from servd.api.output.tool_parsers._harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MARKERS,
    MESSAGE,
    RECIPIENT,
    START,
    header,
    recipient,
)


class HarmonyToolParser(ToolParser):
    """A parser that takes messages to functions as calls. Other messages are content, with their
    headers, unless the reasoning parser of the same name removes these headers first.
    """

    markers = MARKERS
    syntaxes = (
        CallSyntax(
            f"{CHANNEL}commentary to=functions.NAME {CONSTRAIN}json{MESSAGE}ARGUMENTS{CALL}",
            separator=f"{START}assistant",
            answer=f"{CHANNEL}final{MESSAGE}",
            reasoning=(f"{CHANNEL}analysis{MESSAGE}", f"{END}{START}assistant"),
            headers=tuple(
                f"{CHANNEL}{name}{MESSAGE}" for name in ("analysis", "commentary", "final")
            ),
        ),
    )

    @classmethod
    def matches(cls, template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    @classmethod
    def openings(cls) -> tuple[str, ...]:
        return START, CHANNEL

    def body(self) -> Steps[None]:
        if (yield from self.reader.accept(RECIPIENT)):
            yield from self.attempt(self._call())
        elif self.reader.consumed:
            self.content(self.reader.consumed)
        yield from self.read_to_end(*self.openings(), call=self._call)

    def _call(self) -> Steps[bool]:
        reader = self.reader
        name = recipient((yield from header(reader)) or "")
        if not name:
            return False
        yield from reader.space()
        if (yield from reader.peek()) == "{":
            self.begin_call(name)
            if not (yield from self.json_arguments()):
                return False
            yield from reader.space()
            return (yield from reader.accept(CALL)) or (yield from reader.accept(END))
        if not (yield from reader.accept(CALL)):
            return False
        self.begin_call(name)
        self.arguments("{}")
        return True
