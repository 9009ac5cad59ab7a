"""Reasoning between two tags, as a rule at the beginning: what all reasoning parsers share."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from servd.api.output.incremental import Content, Parser, Reasoning, Steps


@dataclass(eq=False)
class ReasoningParser(Parser):
    """Splits an output into reasoning and the rest. White space around the reasoning is dropped.

    Attributes:
        spans: where reasoning begins and ends, in characters of the output; the end of one that
            continues is infinite.
        is_over: all that follows is content.

    Args:
        is_reasoning: the prompt opened the tag, so the output begins with reasoning.
    """

    start_tag: ClassVar[str] = "<think>"
    end_tag: ClassVar[str] = "</think>"
    answer_tag: ClassVar[str] = ""
    """What an answer begins with, also one without reasoning; empty: nothing does."""
    markers: ClassVar[tuple[str, ...]] = ()
    """More text that may be a special token and that the parser needs to see."""
    asked_by: ClassVar[str] = ""
    """Without this text in the prompt the model does not reason."""
    always: ClassVar[bool] = False
    """Outputs begin with reasoning even if nobody opens the tag."""

    is_reasoning: bool
    spans: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]], init=False)
    is_over: bool = field(default=False, init=False)

    @classmethod
    def matches(cls, template: str) -> bool:
        """Return whether a chat template knows the tags."""
        return cls.end_tag in template

    def parse(self) -> Steps[None]:
        """Read the whole output."""
        yield from self.reader.space()
        if (yield from self.reader.accept(self.start_tag)) or self.is_reasoning:
            yield from self._reasoning(self.end_tag)
        elif self.reader.taken:
            self.deltas.append(Content(self.reader.taken))
        self.is_over = True
        while (piece := (yield from self.reader.piece()))[0]:
            self.reader.forget()
            self.deltas.append(Content(piece[0]))

    def _reasoning(self, *ends: str) -> Steps[None]:
        held = ["\n\n"] if self.spans else []  # white space that may be the last of the reasoning
        begin = self.reader.num_taken
        self.spans.append((begin, math.inf))
        yield from self.reader.space()
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
        yield from self.reader.space()
