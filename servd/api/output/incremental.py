"""Incremental parsers of an output's text, which never read a part of the text twice.

A parser is a generator that follows the grammar of its format and yields when it needs more text.
How the text is split into pieces has no effect on the result. The same parser thus serves streams
and complete responses.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TypeVar

import msgspec

from servd.api.text.detokenizer import overlap

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A generator that reads a part of the text. It yields when it needs more text."""


class Content(msgspec.Struct):
    """A delta that adds text to the response's content."""

    text: str


class Reasoning(msgspec.Struct):
    """A delta that adds text to the model's reasoning."""

    text: str


class ToolCallStart(msgspec.Struct):
    """A delta that begins a tool call. Its arguments follow."""

    index: int  # index of the call in the message
    id: str
    name: str
    is_custom: bool = False  # its arguments are the text of a custom tool


class ToolCallArguments(msgspec.Struct):
    """A delta that adds text to a call's arguments. All pieces together are the JSON text, or the
    text of a custom tool.
    """

    index: int
    text: str
    is_custom: bool = False


Delta = Content | Reasoning | ToolCallStart | ToolCallArguments

SPACE = re.compile(r"\s*")
_JSON_MARKS = re.compile(r'["\\{}\[\]]')
_SURROGATE = re.compile("[\ud800-\udfff]")


@cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that finds the next of all markers. A search for each marker could scan all
    the rest repeatedly, if a marker is rare.
    """
    return re.compile("|".join(map(re.escape, sorted(markers))) or "(?!)")


class Reader(msgspec.Struct):
    """A buffer of text that arrives in pieces. `num_taken` characters have been consumed."""

    num_taken: int = 0
    ended: bool = False
    _text: str = ""
    _at: int = 0  # the text before this is consumed
    _pieces: list[str] = []

    @property
    def consumed(self) -> str:
        """The consumed text that is in no delta yet. Malformed text is returned from here."""
        return "".join(self._pieces)

    def forget(self) -> None:
        """Empty `consumed`."""
        self._pieces.clear()

    def push(self, text: str) -> None:
        """Add text that has arrived to the buffer."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def take(self, end: int) -> str:
        """Consume and return the buffered text up to position `end`."""
        text = self._text[self._at : end]
        self._at = end
        self.num_taken += len(text)
        self._pieces.append(text)
        return text

    def untake(self, text: str) -> None:
        """Put back `text`, which was consumed last."""
        self._at -= len(text)
        self.num_taken -= len(text)
        if text:
            self._pieces[-1] = self._pieces[-1].removesuffix(text)

    def unread(self) -> str:
        """Return the buffered text that is not consumed."""
        return self._text[self._at :]

    def peek(self) -> Steps[str]:
        """Return the next character, or "" at the end, without consuming the character."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def next(self) -> Steps[str]:
        """Consume and return the next character, or "" at the end."""
        yield from self.peek()
        return self.take(min(self._at + 1, len(self._text)))

    def accept(self, literal: str) -> Steps[bool]:
        """Consume `literal`, or its beginning if the text ends. Return whether all was there."""
        while True:
            text = self._text[self._at : self._at + len(literal)]
            if not literal.startswith(text):
                return False
            if text == literal or self.ended:
                self.take(self._at + len(text))
                return text == literal
            yield

    def is_at(self, literals: Sequence[str], offset: int = 0) -> Steps[bool]:
        """Return whether one of `literals` is `offset` characters ahead, without consuming it."""
        while literals:
            at = self._at + offset
            if self._text.startswith(tuple(literals), at):
                return True
            has_begun = any(text.startswith(self._text[at : at + len(text)]) for text in literals)
            if self.ended or not has_begun:
                return False
            yield
        return False

    def ahead(self, pattern: re.Pattern[str]) -> Steps[tuple[str, str]]:
        """Return the text that matches `pattern`, and the character after it or "" at the end,
        without consuming them.
        """
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None
            if match.end() < len(self._text) or self.ended:
                return match[0], self._text[match.end() : match.end() + 1]
            yield

    def accept_after_space(self, literal: str) -> Steps[bool]:
        """Consume white space and `literal` (see `accept`), or nothing. Return whether it came."""
        space, _ = yield from self.ahead(SPACE)
        is_there = yield from self.is_at((literal,), len(space))
        at = self._at + len(space)
        begun = self._text[at : at + len(literal)]
        if not is_there and not (begun and literal.startswith(begun)):
            return False
        yield from self.space()
        return (yield from self.accept(literal))

    def take_match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Consume and return what matches `pattern`. Text that arrives later may not change it."""
        match = pattern.match(self._text, self._at)
        if match is not None:
            self.take(match.end())
        return match

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Consume and return text up to a character outside of `pattern`, a repeated set."""
        pieces: list[str] = []
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None
            pieces.append(self.take(match.end()))
            if self._at < len(self._text) or self.ended:
                return "".join(pieces)
            yield

    def space(self) -> Steps[str]:
        return (yield from self.run(SPACE))

    def piece(self, *markers: str) -> Steps[tuple[str, str]]:
        """Consume the text before the next marker as soon as it is certain, or else the marker.
        Return (text, "") or ("", marker), or ("", "") at the end.
        """
        pattern = _any_of(markers)
        while True:
            match = pattern.search(self._text, self._at)
            end, marker = (match.start(), match[0]) if match else (len(self._text), "")
            if marker and end == self._at:
                self.take(end + len(marker))
                return "", marker
            if not marker and not self.ended:
                end -= max((overlap(self._text, marker, self._at) for marker in markers), default=0)
            if end > self._at or self.ended:
                return self.take(end), ""
            yield

    def until(self, marker: str) -> Steps[str | None]:
        """Consume text and the marker after it. Return the text, or None if no marker comes."""
        pieces: list[str] = []
        while True:
            text, end_marker = yield from self.piece(marker)
            if end_marker:
                return "".join(pieces)
            if not text:
                return None
            pieces.append(text)


class Brackets:
    """A scanner for the end of a JSON object or array, in text that arrives in pieces."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self.is_escaped = False  # the text broke off after a backslash

    def end(self, text: str, start: int) -> int:
        """Read `text` from `start`. Return the position after the last bracket; 0 without it."""
        escaped = start if self.is_escaped else -1
        for match in _JSON_MARKS.finditer(text, start):
            char = match[0]
            at = match.start()
            if at == escaped:
                continue
            if self.in_string:
                if char == "\\":
                    escaped = at + 1
                elif char == '"':
                    self.in_string = False
            elif char == '"':
                self.in_string = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return match.end()
        self.is_escaped = escaped == len(text) or (self.is_escaped and start == len(text))
        return 0


@dataclass(eq=False)
class IncrementalParser(ABC):
    """A parser that splits an output into deltas, however the output is split into pieces."""

    reader: Reader = field(default_factory=Reader, init=False)
    deltas: list[Delta] = field(default_factory=list[Delta], init=False)  # since the last call

    @cached_property
    def _steps(self) -> Steps[None]:
        return self.parse()

    @abstractmethod
    def parse(self) -> Steps[None]:
        """Read the whole output, and append its deltas to `deltas`."""

    def feed(self, text: str) -> list[Delta]:
        """Add text. Return the deltas that are certain so far."""
        self.reader.push(text)
        return self._advance()

    def finish(self) -> list[Delta]:
        """Return the remaining deltas, after the end of the text."""
        self.reader.ended = True
        return self._advance()

    def _advance(self) -> list[Delta]:
        next(self._steps, None)
        deltas, self.deltas = self.deltas, []
        return deltas


def without_surrogates(text: str) -> str:
    """Return `text` with U+FFFD for each lone surrogate, which UTF-8 cannot encode."""
    return _SURROGATE.sub("\ufffd", text)
