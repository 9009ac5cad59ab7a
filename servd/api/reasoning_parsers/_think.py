"""Thoughts between two tags at the beginning of the reply."""

from __future__ import annotations

from typing import ClassVar

from servd.api.incremental import Content, Parser, Reasoning, Steps


class ThinkParser(Parser):
    """Splits a reply into thoughts and the rest. White space around the thoughts is dropped.

    Attributes:
        begin: characters of the reply before the thoughts; None until they begin.
        end: characters before the end tag; None until it came.
        is_over: all that follows is content.

    Args:
        is_thinking: the prompt opened the tag, so the reply begins with thoughts.
    """

    start_tag: ClassVar[str] = "<think>"
    end_tag: ClassVar[str] = "</think>"
    always: ClassVar[bool] = False
    """Replies begin with thoughts even if nobody opens the tag."""

    def __init__(self, is_thinking: bool) -> None:
        self.is_thinking = is_thinking
        self.begin: int | None = None
        self.end: int | None = None
        self.is_over = False
        super().__init__()

    @classmethod
    def matches(cls, template: str) -> bool:
        """Whether a chat template knows the tags."""
        return cls.end_tag in template

    def parse(self) -> Steps[None]:
        """Read the whole reply."""
        yield from self.reader.space()
        if (yield from self.reader.accept(self.start_tag)) or self.is_thinking:
            yield from self._thoughts()
        elif self.reader.taken:
            self.deltas.append(Content(self.reader.taken))
        self.is_over = True
        while (piece := (yield from self.reader.piece()))[0]:
            self.reader.forget()
            self.deltas.append(Content(piece[0]))

    def _thoughts(self) -> Steps[None]:
        self.begin = self.reader.num_taken
        held = ""  # white space that may be the last of the thoughts
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
