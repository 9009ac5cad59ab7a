"""ReasoningParser: the common base of the parsers for reasoning between two tags."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from servd.api.output.incremental import Content, IncrementalParser, Reasoning, Steps


@dataclass(eq=False)
class ReasoningParser(IncrementalParser):
    """A parser that splits an output into reasoning and the rest, without white space between.
    Reasoning ends at its tag, or at a call.

    Attributes:
        spans: start and end of each reasoning text, in characters of the output. The end of
            unfinished reasoning is infinite.
        is_over: the rest of the output is content.
        answer_start: where the open text begins, in characters of the output, that is no reasoning.
            None within reasoning, and until that is known.
        has_call: a call ended the reasoning, so that the end tag may still come.

    Args:
        is_reasoning: the prompt opened the tag, so the output begins with reasoning.
        call_marker: text that begins a call. Empty: the output has no calls.
    """

    start_tag: ClassVar[str] = "<think>"
    end_tag: ClassVar[str] = "</think>"
    answer_tag: ClassVar[str] = ""
    """Text that begins every answer, even without reasoning. Empty: no such text."""
    markers: ClassVar[tuple[str, ...]] = ()
    """Further texts that may be special tokens and that the parser must see."""
    asked_by: ClassVar[str] = ""
    """Text that the prompt must contain for the model to reason. Empty: no such text."""
    always: ClassVar[bool] = False
    """Whether outputs begin with reasoning even if neither prompt nor output opens the tag."""

    is_reasoning: bool
    call_marker: str = ""
    spans: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]], init=False)
    is_over: bool = field(default=False, init=False)
    answer_start: int | None = field(default=None, init=False)
    has_call: bool = field(default=False, init=False)

    @classmethod
    def matches(cls, template: str) -> bool:
        """Return whether a chat template contains the end tag."""
        return cls.end_tag in template

    def parse(self) -> Steps[None]:
        """Read the whole output, and append its deltas to `deltas`."""
        yield from self.reader.space()
        if (yield from self.reader.accept(self.start_tag)) or self.is_reasoning:
            yield from self._reasoning(self.end_tag)
            self.answer_start = self.reader.num_taken
        else:
            self.answer_start = 0
            if self.reader.consumed:
                self.deltas.append(Content(self.reader.consumed))
        self.is_over = True
        while (piece := (yield from self.reader.piece()))[0]:
            self.reader.forget()
            self.deltas.append(Content(piece[0]))

    def _reasoning(self, *ends: str) -> Steps[None]:
        held = ["\n\n"] if self.spans else []  # white space that may be the last of the reasoning
        begin = self.reader.num_taken
        self.spans.append((begin, math.inf))
        yield from self.reader.space()
        if self.call_marker:
            ends += (self.call_marker,)
        while True:
            text, marker = yield from self.reader.piece(*ends)
            if not text:
                break
            if visible := text.rstrip():
                self.deltas.append(Reasoning("".join((*held, visible))))
                held.clear()
            held.append(text[len(visible) :])
            self.reader.forget()
        self.spans[-1] = (begin, self.reader.num_taken - len(marker))
        if marker and marker == self.call_marker:
            self.reader.untake(marker)
            self.has_call = True
            return
        yield from self.reader.space()
