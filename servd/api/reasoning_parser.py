"""Reasoning between two tags at the beginning of the output: what all reasoning parsers share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from servd.api.incremental import Content, Parser, Reasoning, Steps


@dataclass(eq=False)
class ReasoningParser(Parser):
    """Splits an output into reasoning and the rest. White space around the reasoning is dropped.

    Attributes:
        begin: characters of the output before the reasoning; None until it begins.
        end: characters before the end tag; None until it came.
        is_over: all that follows is content.

    Args:
        is_reasoning: the prompt opened the tag, so the output begins with reasoning.
    """

    start_tag: ClassVar[str] = "<think>"
    end_tag: ClassVar[str] = "</think>"
    always: ClassVar[bool] = False
    """Outputs begin with reasoning even if nobody opens the tag."""

    is_reasoning: bool
    begin: int | None = field(default=None, init=False)
    end: int | None = field(default=None, init=False)
    is_over: bool = field(default=False, init=False)

    @classmethod
    def matches(cls, template: str) -> bool:
        """Whether a chat template knows the tags."""
        return cls.end_tag in template

    def parse(self) -> Steps[None]:
        """Read the whole output."""
        yield from self.reader.space()
        if (yield from self.reader.accept(self.start_tag)) or self.is_reasoning:
            yield from self._reasoning()
        elif self.reader.taken:
            self.deltas.append(Content(self.reader.taken))
        self.is_over = True
        while (piece := (yield from self.reader.piece()))[0]:
            self.reader.forget()
            self.deltas.append(Content(piece[0]))

    def _reasoning(self) -> Steps[None]:
        self.begin = self.reader.num_taken
        held = ""  # white space that may be the last of the reasoning
        yield from self.reader.space()
        while True:
            text, marker = yield from self.reader.piece(self.end_tag)
            if not text:
                break
            text = held + text
            visible = text.rstrip()
            held = text[len(visible) :]
            if visible:
                self.deltas.append(Reasoning(visible))
            self.reader.forget()
        self.end = self.reader.num_taken - len(marker)
        yield from self.reader.space()
