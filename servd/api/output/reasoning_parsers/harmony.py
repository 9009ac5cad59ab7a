"""GPT-OSS: reasoning on the channel `analysis`, next to `commentary` and `final`."""

from dataclasses import dataclass, field

from servd.api.output.incremental import Content, Steps
from servd.api.output.reasoning_parser import ReasoningParser
from servd.api.output.tool_parsers._harmony import (
    CHANNEL,
    END,
    ENDS,
    MARKERS,
    MESSAGE,
    RECIPIENT,
    START,
    channel,
    header,
    recipient,
)


@dataclass(eq=False)
class HarmonyReasoningParser(ReasoningParser):
    """A parser that takes `analysis` messages as reasoning, wherever they are. Messages to the user
    on other channels are content, separated by empty lines. Calls are left to the tool parser.
    """

    start_tag = f"{CHANNEL}analysis{MESSAGE}"
    end_tag = END
    answer_tag = f"{CHANNEL}final{MESSAGE}"
    markers = MARKERS

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.start_tag in template

    has_content: bool = field(default=False, init=False)

    def parse(self) -> Steps[None]:
        reader = self.reader
        if self.is_reasoning:
            yield from self._reasoning(*ENDS)
        elif (yield from reader.accept(RECIPIENT)):
            yield from self._message()
        elif reader.consumed:
            self._content(reader.consumed)
        while True:
            text, marker = yield from reader.piece(START, CHANNEL, *ENDS)
            if marker in (START, CHANNEL):
                self.answer_start = None
                yield from self._message()
            elif text:
                if self.answer_start is None:
                    self.answer_start = reader.num_taken - len(text)
                self._content(text)
            elif not marker:
                return
            reader.forget()

    def _message(self) -> Steps[None]:
        head = yield from header(self.reader)
        if head is None:
            if not self.reader.ended:  # it was cut off, or it is none
                self._content(self.reader.consumed)
        elif recipient(head):
            had_content = self.has_content
            yield from self._read_message(head)
            self.has_content = had_content
        elif channel(head) == "analysis":
            yield from self._reasoning(*ENDS)
        else:
            yield from self._read_message("\n\n" if self.has_content else "", keeps_end=False)

    def _read_message(self, before: str, keeps_end: bool = True) -> Steps[None]:
        self.answer_start = self.reader.num_taken
        while True:
            text, marker = yield from self.reader.piece(*ENDS)
            if text or keeps_end:
                self._content(before + text + marker)
                before = ""
            if not text:
                self.answer_start = None
                return

    def _content(self, text: str) -> None:
        self.reader.forget()
        if text:
            self.has_content = True
            self.deltas.append(Content(text))
